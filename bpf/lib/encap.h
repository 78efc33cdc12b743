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

#define VXLAN_HAS_VNI 0x08000000
#define TUNNEL_TTL 64
#define TUNNEL_PORT_FIRST 49152 /* RFC 7348 5: source ports from the dynamic range */
#define TUNNEL_PORT_MASK 0x3fff
#define ECN_MASK 3
#define ECN_CE 3
#define ECN_ECT0 2

/* A packet's way through the tunnel. */
struct tunnel {
	struct addr src;
	struct addr dst;
	__u32 vni;
	__be16 port;
	__be16 sport;
	__u8 mac[6]; /* of the other end's device */
	__u8 ipv6;   /* the inner packet is IPv6 */
	__u8 pad;
};

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

inline_fn __u32 tunnel_overhead(const struct tunnel *t)
{
	return addr_is_ipv4(&t->dst) ? sizeof(struct tunnel4) : sizeof(struct tunnel6);
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

/* Write headers of @size bytes, from a multiple of 8, behind the link header. Return: 0, or -1. */
inline_fn int tunnel_write(struct __sk_buff *skb, const void *headers, __u32 size)
{
	void *to = packet(skb) + ETH_HLEN;
	__u32 i;

	if (to + size > packet_end(skb))
		return -1;
	/* By words: the compiler, which must not rely on any alignment, would go byte by byte. */
	for (i = 0; i < size / 8; i++)
		((__u64 *)to)[i] = ((const __u64 *)headers)[i];
	for (i *= 4; i < size / 2; i++)
		((__u16 *)to)[i] = ((const __u16 *)headers)[i];
	return 0;
}

/* The UDP checksum is left to the inner packet's own (RFC 7348 5, RFC 6935). */
inline_fn void tunnel_tail(struct tunnel_tail *tail, const struct tunnel *t, __u32 length)
{
	tail->udp.source = t->sport;
	tail->udp.dest = t->port;
	tail->udp.len = bpf_htons(length);
	tail->vxlan.flags = bpf_htonl(VXLAN_HAS_VNI);
	tail->vxlan.vni = bpf_htonl(t->vni << 8);
	__builtin_memcpy(tail->eth.h_dest, t->mac, ETH_ALEN);
	tail->eth.h_source[0] = 0x02; /* locally administered; nobody learns from it */
	tail->eth.h_proto = t->ipv6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
}

inline_fn int tunnel_push4(struct __sk_buff *skb, const struct tunnel *t, __u8 ecn)
{
	__u32 length = skb->len - ETH_HLEN + sizeof(struct tunnel4);
	struct iphdr ip = { .version = 4, .ihl = 5, .tos = ecn, .ttl = TUNNEL_TTL, .protocol = IPPROTO_UDP };
	struct tunnel4 h __attribute__((aligned(8))) = {};
	__u32 sum = 0;

	ip.tot_len = bpf_htons(length);
	ip.frag_off = bpf_htons(0x4000);
	ip.saddr = t->src.words[3];
	ip.daddr = t->dst.words[3];
	for (int i = 0; i < (int)sizeof(ip) / 2; i++)
		sum += ((__u16 *)&ip)[i];
	sum = (sum & 0xffff) + (sum >> 16);
	ip.check = ~(sum + (sum >> 16));
	h.ip = ip;
	tunnel_tail(&h.tail, t, length - sizeof(h.ip));
	if (bpf_skb_adjust_room(skb, sizeof(h), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
					BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN) | BPF_F_ADJ_ROOM_ENCAP_L2_ETH))
		return -1;
	return tunnel_write(skb, &h, sizeof(h));
}

inline_fn int tunnel_push6(struct __sk_buff *skb, const struct tunnel *t, __u8 ecn)
{
	__u32 length = skb->len - ETH_HLEN + sizeof(struct tunnel6);
	struct tunnel6 h __attribute__((aligned(8))) = {};

	h.ip.version = 6;
	h.ip.flow_lbl[0] = ecn << 4;
	h.ip.payload_len = bpf_htons(length - sizeof(h.ip));
	h.ip.nexthdr = IPPROTO_UDP;
	h.ip.hop_limit = TUNNEL_TTL;
	__builtin_memcpy(&h.ip.saddr, &t->src, sizeof(h.ip.saddr));
	__builtin_memcpy(&h.ip.daddr, &t->dst, sizeof(h.ip.daddr));
	tunnel_tail(&h.tail, t, length - sizeof(h.ip));
	if (bpf_skb_adjust_room(skb, sizeof(h), BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP |
					BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN) | BPF_F_ADJ_ROOM_ENCAP_L2_ETH))
		return -1;
	return tunnel_write(skb, &h, sizeof(h));
}

/**
 * tunnel_push - put the tunnel's headers before a frame's network header
 * Return: 0, or -1 when the packet is to be dropped.
 */
slow_fn int tunnel_push(struct __sk_buff *skb, const struct tunnel *t)
{
	__u8 ecn;

	if (!t)
		return -1;
	ecn = tunnel_ecn(skb, t->ipv6);
	return addr_is_ipv4(&t->dst) ? tunnel_push4(skb, t, ecn) : tunnel_push6(skb, t, ecn);
}
