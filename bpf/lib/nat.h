/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Rewriting a packet's tuple. Checksums are updated by the difference
 * (RFC 1624), so one that was wrong stays wrong, and one that the device is to
 * fill in stays so. SCTP's is in sctp.h.
 */
#pragma once

#include <bpf/bpf_core_read.h>

#include "common.h"
#include "parse.h"
#include "sctp.h"

/* Return: what the sum of @n words becomes more by, as a ones' complement number. */
inline_fn __u32 words_diff(const __be32 *from, const __be32 *to, int n)
{
	__u64 sum = 0;

	for (int i = 0; i < n; i++)
		sum += (__u64)to[i] + (__u32)~from[i];
	opaque(sum); /* else the compiler reads all words here, and adds them up where they are asked for */
	sum = (__u32)sum + (sum >> 32);
	return sum + (sum >> 32);
}

inline_fn __sum16 csum_more(__sum16 check, __u32 diff)
{
	__u32 sum = (__u16)~check + (diff & 0xffff) + (diff >> 16);

	sum = (sum & 0xffff) + (sum >> 16);
	return ~(sum + (sum >> 16));
}

/* @back: of a packet the other way */
inline_fn void tuple_of(struct tuple *t, const struct tuple *from, bool back)
{
	if (back)
		tuple_reverse(t, from);
	else
		*t = *from;
}

/* Both ports as a packet has them. @back: of a packet the other way */
inline_fn __be32 tuple_ports(const struct tuple *t, bool back)
{
	__be32 ports = *(const __be32 *)&t->sport;

	return back ? ports << 16 | ports >> 16 : ports;
}

/* The addresses, and the checksum that covers them. Return: whether the packet has them. */
inline_fn bool nat_addrs_ipv4(struct __sk_buff *skb, const struct tuple *from, const struct addr *src, const struct addr *dst,
			      __u32 *diff)
{
	__be32 old[2] = { from->src.words[3], from->dst.words[3] };
	__be32 new[2] = { src->words[3], dst->words[3] };
	struct iphdr *ip = packet(skb) + ETH_HLEN;

	if ((void *)(ip + 1) > packet_end(skb))
		return false;
	*diff = words_diff(old, new, 2);
	if (in_pod) {
		__be16 with[5] = { csum_more(ip->check, *diff) };

		__builtin_memcpy(with + 1, new, sizeof(new));
		return !bpf_skb_store_bytes(skb, ETH_HLEN + 10, with, sizeof(with), 0);
	}
	ip->check = csum_more(ip->check, *diff);
	ip->saddr = new[0];
	ip->daddr = new[1];
	return true;
}

inline_fn bool nat_addrs_ipv6(struct __sk_buff *skb, const struct addr *src, const struct addr *dst)
{
	struct ipv6hdr *ip = packet(skb) + ETH_HLEN;

	if ((void *)(ip + 1) > packet_end(skb))
		return false;
	if (in_pod)
		return !bpf_skb_store_bytes(skb, ETH_HLEN + 8, src, sizeof(*src), 0) &&
		       !bpf_skb_store_bytes(skb, ETH_HLEN + 24, dst, sizeof(*dst), 0);
	__builtin_memcpy(&ip->saddr, src, sizeof(*src));
	__builtin_memcpy(&ip->daddr, dst, sizeof(*dst));
	return true;
}

/* Both in turn. @diff: what the sum of the addresses becomes more by */
inline_fn bool nat_addrs(struct __sk_buff *skb, const struct pkt *p, const struct tuple *to, bool back, __u32 *diff)
{
	const struct addr *src = back ? &to->dst : &to->src, *dst = back ? &to->src : &to->dst;

	if (!p->ipv6)
		return nat_addrs_ipv4(skb, &p->t, src, dst, diff);
	*diff = words_diff(p->t.src.words, to->src.words, 8); /* a sum does not ask which way around */
	return nat_addrs_ipv6(skb, src, dst);
}

/* The ports, which a packet has that is no later fragment. Return: whether it has them in one piece. */
inline_fn bool nat_ports(struct __sk_buff *skb, __u32 off, __be32 ports)
{
	void *data;
	__be32 *at;

	if (in_pod)
		return !bpf_skb_store_bytes(skb, off, &ports, sizeof(ports), 0);
	data = headers(skb, off + sizeof(ports));
	opaque(off);
	off &= L4_OFF_MASK;
	if (!data)
		return false;
	at = data + off;
	if ((void *)(at + 1) > packet_end(skb))
		return false;
	*at = ports;
	return true;
}

/* The ports of SCTP, and its checksum with them. A checksum of 0 is the device's to fill in, which
 * the kernel sets it to then. Return: whether the packet has them in one piece. */
inline_fn bool nat_sctp_ports(struct __sk_buff *skb, const struct pkt *p, __be32 old, __be32 new)
{
	__u32 off = p->l4_off, change = crc32c_change(old ^ new, p->end - off);
	void *data = headers(skb, off + sizeof(struct sctp_header));
	struct sctp_header *sctp;

	opaque(off);
	off &= L4_OFF_MASK;
	if (!data)
		return false;
	sctp = data + off;
	if ((void *)(sctp + 1) > packet_end(skb))
		return false;
	if (in_pod) {
		__le32 checksum = sctp->checksum ? sctp->checksum ^ change : 0;

		return !bpf_skb_store_bytes(skb, off, &new, sizeof(new), 0) &&
		       !bpf_skb_store_bytes(skb, off + 8, &checksum, sizeof(checksum), 0);
	}
	*(__be32 *)sctp = new;
	if (sctp->checksum)
		sctp->checksum ^= change;
	return true;
}

/* As translate(). The checksum of a packet in fragments cannot follow its ports: how long the whole
 * is, its first fragment does not say. */
slow_fn int translate_sctp(struct __sk_buff *skb, struct pkt *p, const struct tuple *to, bool back)
{
	__be32 old = tuple_ports(&p->t, false), new = tuple_ports(to, back);
	__u32 diff;

	if (p->proto != IPPROTO_SCTP)
		return REASON_NAT_FAILED;
	if (old != new && p->frag)
		return REASON_SCTP_FRAGMENT;
	if (!nat_addrs(skb, p, to, back, &diff))
		return REASON_NAT_FAILED;
	tuple_of(&p->t, to, back);
	return old == new || nat_sctp_ports(skb, p, old, new) ? REASON_NONE : REASON_NAT_FAILED;
}

/* The checksum at @off; -1 when it does not lie where programs can read. */
inline_fn int csum_read(struct __sk_buff *skb, __u32 off)
{
	__sum16 *at;

	opaque(off);
	off &= L4_OFF_MASK;
	at = packet(skb) + off;
	return (void *)(at + 1) <= packet_end(skb) ? *at : -1;
}

/**
 * csum_is_partial - whether a checksum is the device's to fill in: so it has the addresses in it, but not the ports
 * @before: as csum_read() has it, before bpf_l4_csum_replace() put @diff in
 * @after: the same, afterwards
 *
 * Before 6.2 nobody tells programs which it is. But a sum that is to be filled in becomes more by the difference, a complete one,
 * which is a complement, less.
 */
inline_fn bool csum_is_partial(int before, int after, __u32 diff)
{
	diff = (diff & 0xffff) + (diff >> 16);
	diff = (diff & 0xffff) + (diff >> 16);
	before += diff;
	return diff && diff != 0xffff && after == (before & 0xffff) + (before >> 16);
}

/* Bytes from TCP's or UDP's header to its checksum. */
inline_fn __u32 csum_off(bool udp)
{
	return udp ? 6 : 16;
}

/* The checksum of TCP or UDP follows addresses and ports. Return: whether the packet has one. */
slow_fn bool nat_csum(struct __sk_buff *skb, const struct pkt *p, __u32 diff, __be32 old, __be32 new)
{
	bool udp = p->proto == IPPROTO_UDP;
	__u32 csum = p->l4_off + csum_off(udp);
	__u64 zero_is_none = udp ? BPF_F_MARK_MANGLED_0 : 0;
	int before = csum_read(skb, csum);

	if (bpf_l4_csum_replace(skb, csum, 0, diff, BPF_F_PSEUDO_HDR | zero_is_none))
		return false;
	return old == new || csum_is_partial(before, csum_read(skb, csum), diff) ||
	       !bpf_l4_csum_replace(skb, csum, old, new, zero_is_none | sizeof(new));
}

/* A later fragment has no checksum that would follow. IPv4's own header keeps the sum that a device gave of the whole
 * what it was; of IPv6 the sum follows the addresses. */
inline_fn int translated_later(struct __sk_buff *skb, const struct pkt *p, __u32 diff)
{
	if (p->ipv6)
		bpf_csum_update(skb, diff);
	return REASON_NONE;
}

/* The identifier of an echo, and the checksum with it; ICMPv6's covers the addresses, too. */
slow_fn int translate_echo(struct __sk_buff *skb, struct pkt *p, const struct tuple *to, bool back)
{
	__u32 csum = p->l4_off + 2, id = p->l4_off + 4, diff;
	__be16 old = p->t.sport, new = back ? to->dport : to->sport;

	if (!nat_addrs(skb, p, to, back, &diff))
		return REASON_NAT_FAILED;
	tuple_of(&p->t, to, back);
	if (p->frag == FRAG_LATER)
		return translated_later(skb, p, diff);
	if (p->ipv6 && bpf_l4_csum_replace(skb, csum, 0, diff, BPF_F_PSEUDO_HDR))
		return REASON_NAT_FAILED;
	if (p->ipv6) /* as translate() does */
		bpf_csum_update(skb, diff);
	if (old != new && (bpf_skb_store_bytes(skb, id, &new, sizeof(new), 0) ||
			   bpf_l4_csum_replace(skb, csum, old, new, sizeof(new))))
		return REASON_NAT_FAILED;
	return REASON_NONE;
}

/* What a packet's checksum is, to the kernel. */
#define CHECKSUM_NONE 0     /* this, or what comes to it: just in the packet */
#define CHECKSUM_COMPLETE 2 /* the sum of the whole packet is kept beside it */
#define CHECKSUM_PARTIAL 3  /* the device's to fill in: it has the addresses in it, but not the ports */

struct sk_buff___summed {
	__u8 ip_summed : 2;
	__u16 csum_start;
	unsigned char *head;
	unsigned char *data;
} __attribute__((preserve_access_index));

/* From Linux 6.2. No call: the verifier knows that it is the same pointer. */
extern void *bpf_cast_to_kern_ctx(void *skb) __ksym __weak;

/**
 * checksum_kind - what the checksum is of a packet as glance() knows it
 *
 * What a device is to fill in may be that of a packet inside this one, which a pod has put into a tunnel. Then the outer
 * one, of UDP, is whole already; but not that of a bundle, which is made for each packet that it is cut into.
 *
 * Return: one of these, COMPLETE also where the kernel does not tell.
 */
inline_fn int checksum_kind(struct __sk_buff *skb, const struct pkt *p)
{
	struct sk_buff___summed *kernel;
	int kind;

	if (!bpf_cast_to_kern_ctx)
		return CHECKSUM_COMPLETE;
	kernel = bpf_cast_to_kern_ctx(skb);
	kind = BPF_CORE_READ_BITFIELD(kernel, ip_summed);
	if (likely(kind != CHECKSUM_PARTIAL || p->proto == IPPROTO_TCP || skb->gso_size))
		return kind;
	return kernel->data - kernel->head + p->l4_off == kernel->csum_start ? kind : CHECKSUM_NONE;
}

/* Return: the checksum of TCP or UDP when addresses (@diff) and ports become others. */
inline_fn __sum16 csum_turned(__sum16 check, int kind, bool udp, __u32 diff, __be32 old, __be32 new)
{
	if (udp && !check) /* there is none */
		return 0;
	if (likely(kind == CHECKSUM_PARTIAL))
		return ~csum_more(~check, diff);
	check = csum_more(csum_more(check, diff), words_diff(&old, &new, 1));
	return udp && !check ? 0xffff : check;
}

/* Where TCP's or UDP's header of a packet as glance() knows it lies. */
inline_fn __u32 usual_l4(const struct pkt *p)
{
	return ETH_HLEN + (p->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr));
}

/**
 * nat_usual - ports and checksum of a packet as glance() knows it
 * @diff: what the sum of the addresses became more by
 *
 * Return: whether the packet has them.
 */
inline_fn bool nat_usual(struct __sk_buff *skb, const struct pkt *p, int kind, __u32 diff, __be32 old, __be32 new)
{
	bool udp = p->proto == IPPROTO_UDP;
	__u32 l4 = usual_l4(p), check = l4 + csum_off(udp);
	__be32 *ports = packet(skb) + l4;
	__sum16 *at = packet(skb) + check;

	if ((void *)(ports + 1) > packet_end(skb) || (void *)(at + 1) > packet_end(skb))
		return false;
	*at = csum_turned(*at, kind, udp, diff, old, new);
	*ports = new;
	return true;
}

/* What becomes other of IPv4, and what lies between. */
struct turned {
	__be16 unused; /* for alignment */
	__sum16 check; /* of the header, which is followed by: */
	__be32 addrs[2];
	__be32 ports;
	union {
		struct {
			__be32 between[3];
			__sum16 check;
		} tcp;
		struct {
			__be16 length;
			__sum16 check;
		} udp;
	};
};

/* Bytes of a packet, up to that checksum. */
#define TURNED_TO(last) (__builtin_offsetof(struct turned, last) + sizeof(__sum16) - __builtin_offsetof(struct turned, check))

/* @p: its tuple is turned already. @sum: of TCP or UDP, as it will be. Return: whether the packet has all that. */
inline_fn bool nat_stored_ipv4(struct __sk_buff *skb, const struct pkt *p, __u32 diff, __sum16 sum)
{
	struct turned turned = { .addrs = { p->t.src.words[3], p->t.dst.words[3] }, .ports = tuple_ports(&p->t, false) };
	struct iphdr *ip = packet(skb) + ETH_HLEN;
	const __be32 *l4 = (void *)(ip + 1);

	if ((void *)(l4 + 2) > packet_end(skb))
		return false;
	turned.check = csum_more(ip->check, diff);
	if (p->proto == IPPROTO_UDP) {
		turned.udp.length = ((const __be16 *)l4)[2];
		turned.udp.check = sum;
		return !bpf_skb_store_bytes(skb, ETH_HLEN + 10, &turned.check, TURNED_TO(udp.check), 0);
	}
	if ((void *)(l4 + 4) > packet_end(skb))
		return false;
	for (int i = 0; i < 3; i++)
		turned.tcp.between[i] = l4[1 + i];
	turned.tcp.check = sum;
	return !bpf_skb_store_bytes(skb, ETH_HLEN + 10, &turned.check, TURNED_TO(tcp.check), 0);
}

/* A tuple has addresses and ports in IPv6's order. As nat_stored_ipv4. */
inline_fn bool nat_stored_ipv6(struct __sk_buff *skb, const struct pkt *p, __u32 check, __sum16 sum)
{
	return !bpf_skb_store_bytes(skb, ETH_HLEN + 8, &p->t, __builtin_offsetof(struct tuple, pad), 0) &&
	       !bpf_skb_store_bytes(skb, check, &sum, sizeof(sum), 0);
}

#define NAT_BY_PARTS (-1) /* by helpers that know of the sum which the kernel keeps beside the packet, or may */

/* As translate(), of a usual packet inside a pod: each call of a helper takes longer than all that it is given.
 * Return: enum drop_reason, or NAT_BY_PARTS. */
slow_fn int nat_stored(struct __sk_buff *skb, struct pkt *p, const struct tuple *to, bool back)
{
	bool udp = p->proto == IPPROTO_UDP;
	__u32 check = usual_l4(p) + csum_off(udp), diff;
	__sum16 *at = packet(skb) + check, sum;
	int kind = checksum_kind(skb, p);

	if (unlikely(kind == CHECKSUM_COMPLETE))
		return NAT_BY_PARTS;
	if ((void *)(at + 1) > packet_end(skb))
		return REASON_NAT_FAILED;
	diff = words_diff(p->t.src.words, to->src.words, 8); /* a sum does not ask which way around */
	sum = csum_turned(*at, kind, udp, diff, tuple_ports(&p->t, false), tuple_ports(to, back));
	tuple_of(&p->t, to, back);
	if (p->ipv6)
		return nat_stored_ipv6(skb, p, check, sum) ? REASON_NONE : REASON_NAT_FAILED;
	return nat_stored_ipv4(skb, p, diff, sum) ? REASON_NONE : REASON_NAT_FAILED;
}

/**
 * translate - rewrite addresses and ports of a packet
 * @p: the packet; its tuple becomes @to
 * @to: same family; the ports of a later fragment are in its first one
 * @back: @to is of the packets the other way
 *
 * Return: enum drop_reason.
 */
global_fn int translate(struct __sk_buff *skb, struct pkt *p, const struct tuple *to, bool back)
{
	__be32 old, new;
	__u32 diff;
	int kind;

	if (!p || !to)
		return REASON_NAT_FAILED;
	if (unlikely(!p->shape)) {
		if (p->proto == IPPROTO_ICMP || p->proto == IPPROTO_ICMPV6)
			return translate_echo(skb, p, to, back);
		if (p->proto != IPPROTO_UDP && p->proto != IPPROTO_TCP)
			return translate_sctp(skb, p, to, back);
	}
	if (in_pod && likely(p->shape)) {
		int reason = nat_stored(skb, p, to, back);

		if (likely(reason != NAT_BY_PARTS))
			return reason;
	}
	if (!nat_addrs(skb, p, to, back, &diff))
		return REASON_NAT_FAILED;
	old = tuple_ports(&p->t, false);
	new = tuple_ports(to, back);
	tuple_of(&p->t, to, back);
	kind = !in_pod && likely(p->shape) ? checksum_kind(skb, p) : CHECKSUM_COMPLETE;
	if (likely(kind != CHECKSUM_COMPLETE))
		return nat_usual(skb, p, kind, diff, old, new) ? REASON_NONE : REASON_NAT_FAILED;
	if (p->frag == FRAG_LATER)
		return translated_later(skb, p, diff);
	if (old != new && !nat_ports(skb, p->l4_off, new))
		return REASON_NAT_FAILED;
	if (!nat_csum(skb, p, diff, old, new))
		return REASON_NAT_FAILED;
	if (p->ipv6) /* the sum of the whole packet is what it was, which the helper above knows of IPv4 alone */
		bpf_csum_update(skb, diff);
	return REASON_NONE;
}
