/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The tunnel between nodes: VXLAN (RFC 7348) over either family, its headers
 * pushed and stripped here so that a bundle of segments stays one packet. The
 * kernel's device has the UDP port: that keeps GRO alive on the wire, and it
 * takes what is not handled here.
 */
#pragma once

#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>

#include "common.h"
#include "drop.h"

#define VXLAN_HAS_VNI 0x08000000
#define TUNNEL_TTL 64
#define TUNNEL_PORT_FIRST 49152 /* RFC 7348 5: source ports from the dynamic range */
#define TUNNEL_PORT_MASK 0x3fff
#define ECN_MASK 3
#define ECN_CE 3
#define ECN_ECT0 2

struct vxlan {
	__be32 flags;
	__be32 vni; /* in the upper 24 bits */
};

struct tunnel_tail {
	struct udphdr udp;
	struct vxlan vxlan;
	struct ethhdr eth;
} __attribute__((packed));

struct tunnel4 {
	struct iphdr ip;
	struct tunnel_tail tail;
} __attribute__((packed));

struct tunnel6 {
	struct ipv6hdr ip;
	struct tunnel_tail tail;
} __attribute__((packed));

_Static_assert(sizeof(struct tunnel4) == 50 && sizeof(struct tunnel6) == 70, "tunnel");

/* Whether the tunnel to a node leads over IPv6. */
inline_fn bool tunnel_ipv6(const struct remote *r)
{
	return !addr_is_ipv4(&r->addr);
}

inline_fn __u32 tunnel_overhead(const struct remote *r)
{
	return tunnel_ipv6(r) ? sizeof(struct tunnel6) : sizeof(struct tunnel4);
}

/* One port for each flow, so that the wire's hashes spread flows and keep each in order. */
inline_fn __be16 tunnel_port(struct __sk_buff *skb)
{
	__u32 hash = bpf_get_hash_recalc(skb);

	return bpf_htons(TUNNEL_PORT_FIRST + ((hash ^ hash >> 16) & TUNNEL_PORT_MASK));
}

/* The inner packet's congestion mark shows outside (RFC 6040 4.1, compatibility aside). */
inline_fn __u8 tunnel_ecn(struct __sk_buff *skb, bool ipv6)
{
	__be16 *first = packet(skb) + ETH_HLEN;
	__u8 ecn;

	if ((void *)(first + 1) > packet_end(skb))
		return 0;
	ecn = bpf_ntohs(*first) >> (ipv6 ? 4 : 0) & ECN_MASK;
	return ecn == ECN_CE ? ECN_ECT0 : ecn;
}

/*
 * The headers are written where they will lie, in words of 8 bytes (the programs are built little-endian): from
 * fields of a struct the compiler, which must not rely on any alignment, would go byte by byte. The UDP checksum is
 * left to the inner packet's own (RFC 7348 5, RFC 6935).
 */

/* UDP's header. @length: with what follows it */
inline_fn __u64 tunnel_udp(const struct node_config *n, __be16 sport, __u32 length)
{
	return sport | (__u32)n->port << 16 | (__u64)bpf_htons(length) << 32;
}

inline_fn __u64 tunnel_vxlan(const struct node_config *n)
{
	return bpf_htonl(VXLAN_HAS_VNI) | (__u64)bpf_htonl(n->vni << 8) << 32;
}

/* The link header's first 8 bytes: to the other end's device, from a locally administered address, of which nobody
 * learns, and which ends in zeroes. */
inline_fn __u64 tunnel_link(const struct remote *r)
{
	return *(const __u32 *)r->mac | (__u64)*(const __u16 *)(r->mac + 4) << 32 | 0x02ULL << 48;
}

inline_fn __be16 ethertype(bool ipv6)
{
	return ipv6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
}

inline_fn int tunnel_push4(struct __sk_buff *skb, const struct node_config *n, const struct remote *r, __be16 sport,
			   bool ipv6, __u8 ecn)
{
	__u32 length = skb->len - ETH_HLEN + sizeof(struct tunnel4), src = n->ip4.words[3], dst = r->addr.words[3], sum;
	__u32 first = 0x45 | ecn << 8 | (__u32)bpf_htons(length) << 16; /* version and length, TOS; total length */
	__u32 second = (__u32)bpf_htons(0x4000) << 16;           /* no id; not to be cut */
	__u16 third = TUNNEL_TTL | IPPROTO_UDP << 8;
	__u64 *to;

	sum = (first & 0xffff) + (first >> 16) + (second >> 16) + third + (src & 0xffff) + (src >> 16) + (dst & 0xffff) +
	      (dst >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (__u16)~(sum + (sum >> 16));
	if (bpf_skb_adjust_room(skb, sizeof(struct tunnel4), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
					BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN) | BPF_F_ADJ_ROOM_ENCAP_L2_ETH))
		return NEXT;
	to = packet(skb) + ETH_HLEN;
	if ((void *)to + sizeof(struct tunnel4) > packet_end(skb))
		return drop(skb, REASON_ENCAP, DIR_FROM_POD);
	to[0] = first | (__u64)second << 32;
	to[1] = third | sum << 16 | (__u64)src << 32;
	to[2] = dst | tunnel_udp(n, sport, 0) << 32;
	to[3] = tunnel_udp(n, sport, length - sizeof(struct iphdr)) >> 32 | tunnel_vxlan(n) << 32;
	to[4] = tunnel_vxlan(n) >> 32 | tunnel_link(r) << 32;
	to[5] = tunnel_link(r) >> 32;
	*(__be16 *)(to + 6) = ethertype(ipv6);
	return 0;
}

inline_fn int tunnel_push6(struct __sk_buff *skb, const struct node_config *n, const struct remote *r, __be16 sport,
			   bool ipv6, __u8 ecn)
{
	__u32 length = skb->len - ETH_HLEN + sizeof(struct tunnel6) - sizeof(struct ipv6hdr);
	__u64 *to;

	if (bpf_skb_adjust_room(skb, sizeof(struct tunnel6), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
					BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN) | BPF_F_ADJ_ROOM_ENCAP_L2_ETH))
		return NEXT;
	to = packet(skb) + ETH_HLEN;
	if ((void *)to + sizeof(struct tunnel6) > packet_end(skb))
		return drop(skb, REASON_ENCAP, DIR_FROM_POD);
	/* Version, traffic class; length, next header, hop limit. */
	to[0] = 0x60 | ecn << 12 | (__u64)(bpf_htons(length) | IPPROTO_UDP << 16 | TUNNEL_TTL << 24) << 32;
	to[1] = n->ip6.quads[0];
	to[2] = n->ip6.quads[1];
	to[3] = r->addr.quads[0];
	to[4] = r->addr.quads[1];
	to[5] = tunnel_udp(n, sport, length);
	to[6] = tunnel_vxlan(n);
	to[7] = tunnel_link(r);
	*(__u32 *)(to + 8) = 0;
	((__be16 *)(to + 8))[2] = ethertype(ipv6);
	return 0;
}

/**
 * tunnel_push - put the tunnel's headers before a frame's network header
 * @n: this node
 * @r: the one it goes to
 * @ipv6: the packet, which will be the inner one, is
 *
 * Without a call of its own: that is most of what it would cost.
 *
 * Return: 0, or a tc verdict: NEXT leaves the packet as it was, in a tunnel of its sender's own, and the kernel's helper knows
 * only one.
 */
inline_fn int tunnel_push(struct __sk_buff *skb, const struct node_config *n, const struct remote *r, bool ipv6)
{
	__u8 ecn = tunnel_ecn(skb, ipv6);
	__be16 sport = tunnel_port(skb);

	return tunnel_ipv6(r) ? tunnel_push6(skb, n, r, sport, ipv6, ecn) : tunnel_push4(skb, n, r, sport, ipv6, ecn);
}
