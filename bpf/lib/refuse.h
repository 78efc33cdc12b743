/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Refusing a packet so that its sender learns of it at once: a TCP reset
 * (RFC 9293 3.5.2), an SCTP ABORT (RFC 9260 8.4: Linux ignores an unreachable
 * port) or an ICMP port unreachable (RFC 792, RFC 4443 3.1), built where the
 * packet was and handed back to the pod it came from. Never for
 * fragments, never for an error or a reset, and only so many each second.
 * And what a router says of a packet that is too long for its next link (RFC 1191 4,
 * RFC 4443 3.2), of fragments too.
 */
#pragma once

#include "common.h"
#include "deliver.h"
#include "drop.h"
#include "parse.h"
#include "sctp.h"

#define ANSWERS_PER_SECOND 1000 /* of a kind, to one endpoint or to all that are none, on each CPU */

#define ICMP_PORT_UNREACH_TYPE 3
#define ICMP_PORT_UNREACH_CODE 3
#define ICMPV6_UNREACH_TYPE 1
#define ICMPV6_PORT_UNREACH_CODE 4
#define ICMP_FRAG_NEEDED_CODE 4
#define ICMPV6_TOO_BIG_TYPE 2
#define QUOTED_L4 8 /* bytes of the transport header: the ports are in it */

struct icmp_header {
	__u8 type;
	__u8 code;
	__sum16 check;
	__be32 unused;
};

struct reset4 {
	struct iphdr ip;
	struct tcphdr tcp;
};

struct reset6 {
	struct ipv6hdr ip;
	struct tcphdr tcp;
};

struct sctp_abort {
	struct sctp_header header;
	struct sctp_chunk_header chunk;
};

struct abort4 {
	struct iphdr ip;
	struct sctp_abort sctp;
};

struct abort6 {
	struct ipv6hdr ip;
	struct sctp_abort sctp;
};

struct unreach4 {
	struct iphdr ip;
	struct icmp_header icmp;
	struct iphdr quoted;
	__u8 l4[QUOTED_L4];
};

struct unreach6 {
	struct ipv6hdr ip;
	struct icmp_header icmp;
	struct ipv6hdr quoted;
	__u8 l4[QUOTED_L4];
};

/* Quotes the ports behind a fragment's header, or a few options, too. */
struct too_long4 {
	struct iphdr ip;
	struct icmp_header icmp;
	__u8 quoted[48];
};

struct too_long6 {
	struct ipv6hdr ip;
	struct icmp_header icmp;
	__u8 quoted[80];
};

/* The parts of a checksum that is no header's: addresses, length, protocol (RFC 9293 3.1). */
struct pseudo {
	struct addr src;
	struct addr dst;
	__be32 length;
	__be32 proto;
};

inline_fn __sum16 csum_fold(__s64 sum)
{
	__u32 s = (__u32)sum;

	s = (s & 0xffff) + (s >> 16);
	s = (s & 0xffff) + (s >> 16);
	return ~s;
}

/* For IPv4 too: ::ffff: adds 0xffff to either address, which is zero in this arithmetic. */
inline_fn __s64 pseudo_sum(const struct pkt *p, __u32 length, __u8 proto)
{
	struct pseudo ps = { .src = p->t.dst, .dst = p->t.src, .length = bpf_htonl(length),
			     .proto = bpf_htonl(proto) };

	return bpf_csum_diff(NULL, 0, (__be32 *)&ps, sizeof(ps), 0);
}

inline_fn void ip4_header(struct iphdr *ip, const struct pkt *p, __u16 length, __u8 proto)
{
	ip->version = 4;
	ip->ihl = 5;
	ip->tot_len = bpf_htons(length);
	ip->frag_off = bpf_htons(0x4000);
	ip->ttl = 64;
	ip->protocol = proto;
	ip->saddr = p->t.dst.words[3];
	ip->daddr = p->t.src.words[3];
	ip->check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)ip, sizeof(*ip), 0));
}

inline_fn void ip6_header(struct ipv6hdr *ip, const struct pkt *p, __u16 payload, __u8 proto)
{
	ip->version = 6;
	ip->payload_len = bpf_htons(payload);
	ip->nexthdr = proto;
	ip->hop_limit = 64;
	__builtin_memcpy(&ip->saddr, &p->t.dst, 16);
	__builtin_memcpy(&ip->daddr, &p->t.src, 16);
}

/* Fills @rst, zeroed before, as the answer to the segment at l4_off. */
inline_fn int tcp_reset(struct __sk_buff *skb, const struct pkt *p, struct tcphdr *rst)
{
	struct tcphdr seg;

	if (bpf_skb_load_bytes(skb, p->l4_off, &seg, sizeof(seg)))
		return -1;
	rst->source = seg.dest;
	rst->dest = seg.source;
	rst->doff = sizeof(*rst) / 4;
	rst->rst = 1;
	if (seg.ack) {
		rst->seq = seg.ack_seq;
	} else {
		rst->ack = 1;
		rst->ack_seq = bpf_htonl(bpf_ntohl(seg.seq) + seg.syn + seg.fin +
					 (p->end - p->l4_off - seg.doff * 4));
	}
	rst->check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)rst, sizeof(*rst),
					     pseudo_sum(p, sizeof(*rst), IPPROTO_TCP)));
	return 0;
}

#define SCTP_TAG_REFLECTED 1 /* the T bit: the tag is the one that the refused packet has */

/* Fills @abort, zeroed before, as the answer to the packet at l4_off (RFC 9260 8.4, 8.5.1). */
inline_fn int sctp_abort(struct __sk_buff *skb, const struct pkt *p, struct sctp_abort *abort)
{
	const __u32 *words = (__u32 *)abort;
	__u32 sum = CRC32C_16_ZEROS;
	struct sctp_abort to;

	if (bpf_skb_load_bytes(skb, p->l4_off, &to, sizeof(to)))
		return -1;
	abort->header.source = to.header.dest;
	abort->header.dest = to.header.source;
	abort->header.tag = to.header.tag;
	abort->chunk.type = SCTP_ABORT;
	abort->chunk.flags = SCTP_TAG_REFLECTED;
	abort->chunk.length = bpf_htons(sizeof(abort->chunk));
	if (to.chunk.type == SCTP_INIT) {
		if (bpf_skb_load_bytes(skb, p->l4_off + sizeof(to), &abort->header.tag, sizeof(abort->header.tag)))
			return -1;
		abort->chunk.flags = 0;
	}
	for (int i = 0; i < 4; i++)
		sum ^= crc32c_change(words[i], sizeof(*abort) - i * sizeof(*words));
	abort->header.checksum = sum;
	return 0;
}
_Static_assert(sizeof(struct sctp_abort) == 16, "sctp_abort");

/* The answer goes back along the link: the two link addresses change places. */
inline_fn int replace_packet(struct __sk_buff *skb, const void *with, __u32 length)
{
	__u8 macs[2 * ETH_ALEN];

	if (bpf_skb_load_bytes(skb, 0, macs + ETH_ALEN, ETH_ALEN) ||
	    bpf_skb_load_bytes(skb, ETH_ALEN, macs, ETH_ALEN) ||
	    bpf_skb_change_tail(skb, ETH_HLEN + length, 0) || bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return -1;
	return bpf_skb_store_bytes(skb, ETH_HLEN, with, length, 0);
}

global_fn int reset_ipv4(struct __sk_buff *skb, struct pkt *p)
{
	struct reset4 r = {};

	if (!p || tcp_reset(skb, p, &r.tcp))
		return -1;
	ip4_header(&r.ip, p, sizeof(r), IPPROTO_TCP);
	return replace_packet(skb, &r, sizeof(r));
}

global_fn int reset_ipv6(struct __sk_buff *skb, struct pkt *p)
{
	struct reset6 r = {};

	if (!p || tcp_reset(skb, p, &r.tcp))
		return -1;
	ip6_header(&r.ip, p, sizeof(r.tcp), IPPROTO_TCP);
	return replace_packet(skb, &r, sizeof(r));
}

global_fn int abort_ipv4(struct __sk_buff *skb, struct pkt *p)
{
	struct abort4 a = {};

	if (!p || sctp_abort(skb, p, &a.sctp))
		return -1;
	ip4_header(&a.ip, p, sizeof(a), IPPROTO_SCTP);
	return replace_packet(skb, &a, sizeof(a));
}

global_fn int abort_ipv6(struct __sk_buff *skb, struct pkt *p)
{
	struct abort6 a = {};

	if (!p || sctp_abort(skb, p, &a.sctp))
		return -1;
	ip6_header(&a.ip, p, sizeof(a.sctp), IPPROTO_SCTP);
	return replace_packet(skb, &a, sizeof(a));
}

global_fn int unreach_ipv4(struct __sk_buff *skb, struct pkt *p)
{
	struct unreach4 u = {};

	if (!p || p->l4_off != ETH_HLEN + sizeof(u.quoted) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN, &u.quoted, sizeof(u.quoted) + QUOTED_L4))
		return -1;
	u.icmp.type = ICMP_PORT_UNREACH_TYPE;
	u.icmp.code = ICMP_PORT_UNREACH_CODE;
	u.icmp.check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&u.icmp,
					       sizeof(u.icmp) + sizeof(u.quoted) + QUOTED_L4, 0));
	ip4_header(&u.ip, p, sizeof(u), IPPROTO_ICMP);
	return replace_packet(skb, &u, sizeof(u));
}

global_fn int unreach_ipv6(struct __sk_buff *skb, struct pkt *p)
{
	struct unreach6 u = {};
	const __u32 length = sizeof(u.icmp) + sizeof(u.quoted) + QUOTED_L4;

	if (!p || p->l4_off != ETH_HLEN + sizeof(u.quoted) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN, &u.quoted, sizeof(u.quoted) + QUOTED_L4))
		return -1;
	u.icmp.type = ICMPV6_UNREACH_TYPE;
	u.icmp.code = ICMPV6_PORT_UNREACH_CODE;
	u.icmp.check = csum_fold(
		bpf_csum_diff(NULL, 0, (__be32 *)&u.icmp, length, pseudo_sum(p, length, IPPROTO_ICMPV6)));
	ip6_header(&u.ip, p, length, IPPROTO_ICMPV6);
	return replace_packet(skb, &u, sizeof(u));
}

/* @mtu: that of the next link */
global_fn int too_long_ipv4(struct __sk_buff *skb, struct pkt *p, __u32 mtu)
{
	struct too_long4 u = {};

	if (!p || bpf_skb_load_bytes(skb, ETH_HLEN, u.quoted, sizeof(u.quoted)))
		return -1;
	u.icmp.type = ICMP_PORT_UNREACH_TYPE;
	u.icmp.code = ICMP_FRAG_NEEDED_CODE;
	u.icmp.unused = bpf_htonl(mtu);
	u.icmp.check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&u.icmp, sizeof(u.icmp) + sizeof(u.quoted), 0));
	ip4_header(&u.ip, p, sizeof(u), IPPROTO_ICMP);
	return replace_packet(skb, &u, sizeof(u));
}

global_fn int too_long_ipv6(struct __sk_buff *skb, struct pkt *p, __u32 mtu)
{
	struct too_long6 u = {};
	const __u32 length = sizeof(u.icmp) + sizeof(u.quoted);

	if (!p || bpf_skb_load_bytes(skb, ETH_HLEN, u.quoted, sizeof(u.quoted)))
		return -1;
	u.icmp.type = ICMPV6_TOO_BIG_TYPE;
	u.icmp.unused = bpf_htonl(mtu);
	u.icmp.check = csum_fold(
		bpf_csum_diff(NULL, 0, (__be32 *)&u.icmp, length, pseudo_sum(p, length, IPPROTO_ICMPV6)));
	ip6_header(&u.ip, p, length, IPPROTO_ICMPV6);
	return replace_packet(skb, &u, sizeof(u));
}

/* Whether whoever sent a packet may have one more answer in this second. Each has a share of its own, so that nobody's
 * stray packets silence what others are told; and so has each kind. */
inline_fn bool may_answer(struct __sk_buff *skb, bool too_long, __u32 now)
{
	__u32 id = skb->cb[CB_ENDPOINT];
	struct answers *a = bpf_map_lookup_elem(&mst_answers_v1, &id);
	__u16 *count;

	if (!a)
		return false;
	if (dry_run)
		return true;
	if (a->second != now)
		*a = (struct answers){ .second = now };
	count = too_long ? &a->too_long : &a->refusals;
	if (*count >= ANSWERS_PER_SECOND)
		return false;
	++*count;
	return true;
}

/* Whether a refused packet is one that gets an answer. */
inline_fn bool answerable(struct __sk_buff *skb, const struct pkt *p, __u32 now)
{
	return !p->frag && !(p->tcp_flags & TCP_RST) &&
	       (p->proto == IPPROTO_TCP || p->proto == IPPROTO_UDP || p->proto == IPPROTO_SCTP) &&
	       may_answer(skb, false, now);
}

/**
 * answer - count a refused packet, tell of it, and turn it into the answer to it
 * @reason: under which it is counted
 * @dir: enum direction
 *
 * Return: whether there is an answer.
 */
inline_fn bool answer(struct __sk_buff *skb, struct pkt *p, __u32 reason, __u32 dir, __u32 now)
{
	bool tell = answerable(skb, p, now);

	count_drop(skb, reason, dir);
	event_stopped(skb, reason, dir, tell ? EVENT_REFUSED : EVENT_DROPPED, now);
	if (!tell)
		return false;
	if (p->proto == IPPROTO_TCP)
		return !(p->ipv6 ? reset_ipv6(skb, p) : reset_ipv4(skb, p));
	if (p->proto == IPPROTO_SCTP)
		return !(p->ipv6 ? abort_ipv6(skb, p) : abort_ipv4(skb, p));
	return !(p->ipv6 ? unreach_ipv6(skb, p) : unreach_ipv4(skb, p));
}

/**
 * refuse - drop a pod's packet and tell the pod
 * @self: the endpoint it came from
 * @reason: under which it is counted
 *
 * Return: a tc verdict.
 */
slow_fn int refuse(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, __u32 reason, __u32 now)
{
	return answer(skb, p, reason, DIR_FROM_POD, now) ? reflect(skb, self) : TC_ACT_SHOT;
}
