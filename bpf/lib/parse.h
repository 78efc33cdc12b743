/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * From bytes to a tuple: Ethernet, IPv4 (RFC 791), IPv6 with its extension
 * headers (RFC 8200), TCP, UDP, SCTP, ICMP and ICMPv6. A packet is either a part of
 * a flow, an ICMP error about one, or link control that no flow state is kept
 * for; anything that does not add up has a reason to be dropped.
 */
#pragma once

#include <linux/icmpv6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "common.h"

#define IP6_OFFSET_MASK 0xfff8
#define IP6_MORE_FRAGMENTS 1
#define MAX_EXT_HEADERS 6
#define L4_OFF_MASK 0x3ff /* headers before the transport header: less than 1 KiB */

/* RFC 792; linux/icmp.h pulls in the C library. */
enum icmp_type {
	ICMP_ECHOREPLY = 0,
	ICMP_DEST_UNREACH = 3,
	ICMP_SOURCE_QUENCH = 4,
	ICMP_REDIRECT = 5,
	ICMP_ECHO = 8,
	ICMP_TIME_EXCEEDED = 11,
	ICMP_PARAMETERPROB = 12,
};

/* RFC 9260 3.1 */
struct sctp_header {
	__be16 source;
	__be16 dest;
	__be32 tag;
	__le32 checksum;
};

/* RFC 9260 3.2: the head of a chunk. No packet is without one. */
struct sctp_chunk_header {
	__u8 type; /* enum sctp_chunk */
	__u8 flags;
	__be16 length;
};

/* RFC 9260 3.2: those that begin or end an association. All but ABORT are alone in their packet. */
enum sctp_chunk {
	SCTP_INIT = 1,
	SCTP_INIT_ACK = 2,
	SCTP_ABORT = 6,
	SCTP_SHUTDOWN_COMPLETE = 14,
};

enum pkt_kind {
	PKT_FLOW,       /* has a tuple */
	PKT_ICMP_ERROR, /* carries a part of another packet */
	PKT_CONTROL,    /* ARP, neighbour and listener discovery, multicast: the kernel's own business */
};

enum pkt_frag {
	FRAG_NONE,
	FRAG_FIRST, /* has the transport header */
	FRAG_LATER, /* has not */
};

enum tcp_flag {
	TCP_FIN = 0x01,
	TCP_SYN = 0x02,
	TCP_RST = 0x04,
	TCP_ACK = 0x10,
};

/* How much of a packet a glance could read. */
enum pkt_shape {
	SHAPE_UNKNOWN = 0, /* nothing: parse() must */
	SHAPE_ENDS = 1,    /* all, and it closes a flow, whose entry must learn of it */
	SHAPE_OPENS = 2,   /* all, but packets like it open a flow: those that follow may take the short way */
	SHAPE_USUAL = 3,   /* all, and packets like it may take the short way */
};

struct pkt {
	struct tuple t;
	__u32 l4_off;  /* bytes from the link header to the transport header */
	__u32 end;     /* bytes from the link header to the end of the IP packet */
	union {
		__u32 frag_id; /* network order, as found */
		__u32 tables;  /* of a usual shape: the tables' generation, when it came (near.h) */
	};
	__u8 ipv6;
	__u8 proto;
	__u8 kind;      /* enum pkt_kind */
	__u8 frag;      /* enum pkt_frag */
	__u8 tcp_flags; /* enum tcp_flag, of any TCP packet with a header; of SCTP, what its first chunk comes to */
	__u8 icmp_type;
	__u8 shape;     /* enum pkt_shape */
	__u8 masqueraded; /* 1: it leaves as by a router, and what cannot leave is the stack's to answer (masquerade.h) */
	union {
		__u32 generation; /* of what is kept of its flow, when it came (fast.h) */
		__u32 remote;     /* later, where send_out says so: the node that it goes to */
	};
};
_Static_assert(sizeof(struct pkt) == 64, "pkt");

/**
 * headers - make the first @len bytes readable
 * Return: pointer to the packet, or NULL when it is shorter.
 */
inline_fn void *headers(struct __sk_buff *skb, __u32 len)
{
	void *data = packet(skb);
	void *end = packet_end(skb);

	if (data + len <= end)
		return data;
	if (bpf_skb_pull_data(skb, len))
		return NULL;
	data = packet(skb);
	end = packet_end(skb);
	return data + len <= end ? data : NULL;
}

/* Whether an ICMP message has an identifier, which tells flows apart. */
inline_fn bool is_echo(__u8 proto, __u8 type)
{
	return proto == IPPROTO_ICMP ? type == ICMP_ECHO || type == ICMP_ECHOREPLY
				     : type == ICMPV6_ECHO_REQUEST || type == ICMPV6_ECHO_REPLY;
}

inline_fn int parse_icmp(struct pkt *p, __u8 type, __be16 id)
{
	p->icmp_type = type;
	if (p->proto == IPPROTO_ICMP) {
		if (type == ICMP_DEST_UNREACH || type == ICMP_SOURCE_QUENCH || type == ICMP_REDIRECT ||
		    type == ICMP_TIME_EXCEEDED || type == ICMP_PARAMETERPROB)
			p->kind = PKT_ICMP_ERROR;
	} else if (type < ICMPV6_ECHO_REQUEST) { /* RFC 4443 2.1: errors have the high bit clear */
		p->kind = PKT_ICMP_ERROR;
	}
	if (is_echo(p->proto, type)) {
		p->t.sport = id;
		p->t.dport = id;
	} else {
		p->t.sport = 0;
		p->t.dport = bpf_htons(type);
	}
	return REASON_NONE;
}

inline_fn int parse_tcp(struct pkt *p, const struct tcphdr *tcp)
{
	__u32 length = tcp->doff * 4;

	if (length < sizeof(*tcp))
		return REASON_BAD_HEADER;
	if (p->l4_off + length > p->end)
		return REASON_BAD_LENGTH;
	p->t.sport = tcp->source;
	p->t.dport = tcp->dest;
	p->tcp_flags = ((const __u8 *)tcp)[13];
	return REASON_NONE;
}

/* What a chunk does to an association, as the flag that does it to a connection: INIT opens, and
 * neither end owes the other anything after ABORT or SHUTDOWN COMPLETE. */
inline_fn int parse_sctp(struct __sk_buff *skb, struct pkt *p, const struct sctp_header *sctp)
{
	__u32 off = p->l4_off + sizeof(*sctp);
	struct sctp_chunk_header chunk;

	p->t.sport = sctp->source;
	p->t.dport = sctp->dest;
	if (off + sizeof(chunk) > p->end)
		return p->frag == FRAG_FIRST ? REASON_FRAG_TINY : REASON_TRUNCATED;
	/* Copied, for it must stay where it is: a bundle is a header alone, with a list of packets
	 * without one, and the kernel reads each from its first chunk on. */
	if (bpf_skb_load_bytes(skb, off, &chunk, sizeof(chunk)))
		return REASON_TRUNCATED;
	if (chunk.type == SCTP_INIT)
		p->tcp_flags = TCP_SYN;
	else if (chunk.type == SCTP_INIT_ACK)
		p->tcp_flags = TCP_SYN | TCP_ACK;
	else if (chunk.type == SCTP_ABORT || chunk.type == SCTP_SHUTDOWN_COMPLETE)
		p->tcp_flags = TCP_RST;
	else
		p->tcp_flags = TCP_ACK;
	return REASON_NONE;
}

inline_fn int parse_udp(struct __sk_buff *skb, struct pkt *p, const struct udphdr *udp)
{
	__u32 length = bpf_ntohs(udp->len);

	/* 0 is a length over 65,535 (RFC 2675), which only segmentation offload makes. */
	if (length < sizeof(*udp) && (length || !skb->gso_size))
		return REASON_BAD_LENGTH;
	if (p->frag == FRAG_NONE && p->l4_off + length > p->end)
		return REASON_BAD_LENGTH;
	p->t.sport = udp->source;
	p->t.dport = udp->dest;
	return REASON_NONE;
}

/**
 * parse_l4 - ports and flags, for a packet that has its transport header
 * Return: enum drop_reason.
 */
inline_fn int parse_l4(struct __sk_buff *skb, struct pkt *p)
{
	__u32 need = 0, off = p->l4_off;
	void *data, *l4;

	if (p->proto == IPPROTO_TCP)
		need = sizeof(struct tcphdr);
	else if (p->proto == IPPROTO_SCTP)
		need = sizeof(struct sctp_header);
	else if (p->proto == IPPROTO_UDP || p->proto == IPPROTO_ICMP || p->proto == IPPROTO_ICMPV6)
		need = 8;
	else
		return REASON_NONE;
	if (off + need > p->end)
		return p->frag == FRAG_FIRST ? REASON_FRAG_TINY : REASON_TRUNCATED;

	opaque(off);
	off &= L4_OFF_MASK;
	data = headers(skb, off + need);
	if (!data)
		return REASON_TRUNCATED;
	l4 = data + off;
	if (p->proto == IPPROTO_TCP) {
		if (l4 + sizeof(struct tcphdr) > packet_end(skb))
			return REASON_TRUNCATED;
		return parse_tcp(p, l4);
	}
	if (p->proto == IPPROTO_SCTP) {
		if (l4 + sizeof(struct sctp_header) > packet_end(skb))
			return REASON_TRUNCATED;
		return parse_sctp(skb, p, l4);
	}
	if (l4 + 8 > packet_end(skb))
		return REASON_TRUNCATED;
	if (p->proto == IPPROTO_UDP)
		return parse_udp(skb, p, l4);
	return parse_icmp(p, ((__u8 *)l4)[0], ((__be16 *)l4)[2]);
}

inline_fn void note_fragment(struct pkt *p, bool first, __u32 id)
{
	p->frag = first ? FRAG_FIRST : FRAG_LATER;
	p->frag_id = id;
}

inline_fn int parse_ipv4(struct __sk_buff *skb, struct pkt *p)
{
	__u32 length, total, avail = skb->len - ETH_HLEN;
	void *data = headers(skb, ETH_HLEN + sizeof(struct iphdr));
	struct iphdr *ip;
	__u16 frag;

	if (!data)
		return REASON_TRUNCATED;
	ip = data + ETH_HLEN;
	if ((void *)(ip + 1) > packet_end(skb))
		return REASON_TRUNCATED;
	length = ip->ihl * 4;
	if (ip->version != 4 || length < sizeof(*ip))
		return REASON_BAD_HEADER;
	total = bpf_ntohs(ip->tot_len);
	if (!total && skb->gso_size) /* BIG TCP: longer than the field can say */
		total = avail;
	if (total < length || total > avail)
		return REASON_BAD_LENGTH;
	p->l4_off = ETH_HLEN + length;
	p->end = ETH_HLEN + total;
	p->proto = ip->protocol;
	if (p->proto == IPPROTO_ICMPV6)
		return REASON_BAD_HEADER;
	addr_from_ipv4(&p->t.src, ip->saddr);
	addr_from_ipv4(&p->t.dst, ip->daddr);
	if ((ip->daddr & bpf_htonl(0xf0000000)) == bpf_htonl(0xe0000000) || ip->daddr == 0xffffffff)
		p->kind = PKT_CONTROL;
	frag = bpf_ntohs(ip->frag_off);
	if (frag & (IP_MORE_FRAGMENTS | IP_OFFSET_MASK)) {
		note_fragment(p, !(frag & IP_OFFSET_MASK), ip->id);
		if (p->frag == FRAG_LATER)
			/* RFC 1858: 8 bytes of TCP leave the flags to the next fragment */
			return (frag & IP_OFFSET_MASK) * 8 < sizeof(struct tcphdr) && p->proto == IPPROTO_TCP
				       ? REASON_FRAG_OVERLAP
				       : REASON_NONE;
	}
	return parse_l4(skb, p);
}

struct ext_header {
	__u8 next;
	__u8 length; /* in 8 bytes, without the first 8 */
	__be16 frag_off;
	__be32 frag_id;
};

/**
 * skip_ext_headers - follow IPv6's chain to the transport header
 * Return: enum drop_reason; on success @p has proto, l4_off and fragment.
 */
slow_fn int skip_ext_headers(struct __sk_buff *skb, struct pkt *p)
{
	struct ext_header h;

	for (int i = 0; i <= MAX_EXT_HEADERS; i++) {
		__u8 type = p->proto;

		if (type != IPPROTO_HOPOPTS && type != IPPROTO_ROUTING && type != IPPROTO_DSTOPTS &&
		    type != IPPROTO_FRAGMENT && type != IPPROTO_AH)
			return REASON_NONE;
		if (i == MAX_EXT_HEADERS)
			break;
		if (type == IPPROTO_HOPOPTS && i)
			return REASON_BAD_HEADER; /* RFC 8200 4.1: only first */
		if (p->l4_off + sizeof(h) > p->end || bpf_skb_load_bytes(skb, p->l4_off, &h, sizeof(h)))
			return REASON_TRUNCATED;
		p->proto = h.next;
		if (type == IPPROTO_FRAGMENT) {
			__u16 off = bpf_ntohs(h.frag_off);

			p->l4_off += sizeof(h);
			if (off & (IP6_OFFSET_MASK | IP6_MORE_FRAGMENTS)) {
				note_fragment(p, !(off & IP6_OFFSET_MASK), h.frag_id);
				if (p->frag == FRAG_LATER)
					return (off & IP6_OFFSET_MASK) < sizeof(struct tcphdr) &&
							       p->proto == IPPROTO_TCP
						       ? REASON_FRAG_OVERLAP
						       : REASON_NONE;
			}
		} else if (type == IPPROTO_AH) {
			p->l4_off += (h.length + 2) * 4;
		} else {
			p->l4_off += (h.length + 1) * 8;
		}
		if (p->l4_off > p->end)
			return REASON_TRUNCATED;
		if (p->l4_off > L4_OFF_MASK - sizeof(struct tcphdr))
			return REASON_EXT_HEADERS;
	}
	return REASON_EXT_HEADERS;
}

inline_fn bool link_local(const struct addr *a)
{
	return a->bytes[0] == 0xfe && (a->bytes[1] & 0xc0) == 0x80;
}

/* Whether a packet of ICMPv6 to one receiver is what neighbours on a link tell each other: that no router let it
 * through shows by the hop limit of neighbour discovery (RFC 4861 6.1), by the source of listener discovery (RFC 3810 5). */
inline_fn bool of_neighbours(const struct pkt *p, __u8 hop_limit)
{
	if (p->frag != FRAG_NONE) /* RFC 6980 */
		return false;
	if (p->icmp_type >= 133 && p->icmp_type <= 137)
		return hop_limit == 255;
	return ((p->icmp_type >= 130 && p->icmp_type <= 132) || p->icmp_type == 143) && link_local(&p->t.src);
}

inline_fn int parse_ipv6(struct __sk_buff *skb, struct pkt *p)
{
	__u32 payload, avail = skb->len - ETH_HLEN - sizeof(struct ipv6hdr);
	void *data = headers(skb, ETH_HLEN + sizeof(struct ipv6hdr));
	struct ipv6hdr *ip;
	__u8 hop_limit;
	int reason;

	if (!data)
		return REASON_TRUNCATED;
	ip = data + ETH_HLEN;
	if ((void *)(ip + 1) > packet_end(skb))
		return REASON_TRUNCATED;
	if (ip->version != 6)
		return REASON_BAD_HEADER;
	payload = bpf_ntohs(ip->payload_len);
	if (!payload && skb->gso_size) /* BIG TCP */
		payload = avail;
	if (payload > avail)
		return REASON_BAD_LENGTH;
	p->ipv6 = 1;
	p->l4_off = ETH_HLEN + sizeof(*ip);
	p->end = p->l4_off + payload;
	p->proto = ip->nexthdr;
	hop_limit = ip->hop_limit;
	__builtin_memcpy(&p->t.src, &ip->saddr, 16);
	__builtin_memcpy(&p->t.dst, &ip->daddr, 16);
	if (addr_is_ipv4(&p->t.src) || addr_is_ipv4(&p->t.dst))
		return REASON_BAD_HEADER; /* never on the wire; would be taken for IPv4 */
	if (p->t.dst.bytes[0] == 0xff)
		p->kind = PKT_CONTROL;
	if (p->proto != IPPROTO_TCP && p->proto != IPPROTO_UDP && p->proto != IPPROTO_ICMPV6) {
		reason = skip_ext_headers(skb, p);
		if (reason || p->frag == FRAG_LATER)
			return reason;
	}
	if (p->proto == IPPROTO_ICMP)
		return REASON_BAD_HEADER;
	reason = parse_l4(skb, p);
	if (!reason && p->proto == IPPROTO_ICMPV6 && of_neighbours(p, hop_limit))
		p->kind = PKT_CONTROL;
	return reason;
}

/**
 * parse - read a frame's headers
 * @skb: the frame, its link header first
 * @p: filled; must be zeroed
 *
 * Return: enum drop_reason.
 */
global_fn int parse(struct __sk_buff *skb, struct pkt *p)
{
	void *data = headers(skb, ETH_HLEN);
	struct ethhdr *eth = data;

	if (!data || !p || (void *)(eth + 1) > packet_end(skb))
		return REASON_TRUNCATED;
	if (skb->vlan_present)
		return REASON_ETHERTYPE;
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return parse_ipv4(skb, p);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		return parse_ipv6(skb, p);
	if (eth->h_proto == bpf_htons(ETH_P_ARP)) {
		p->kind = PKT_CONTROL;
		p->proto = 0;
		return REASON_NONE;
	}
	return REASON_ETHERTYPE;
}

/* Whether a packet may be the first of its flow. */
inline_fn bool opens(const struct pkt *p)
{
	return p->proto == IPPROTO_UDP || (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

/* Whether a packet is in the middle of a connection: it does not say who opened that. */
inline_fn bool in_midst(const struct pkt *p)
{
	return (p->proto == IPPROTO_TCP || p->proto == IPPROTO_SCTP) && !opens(p);
}
