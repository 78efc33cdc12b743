/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Taking a packet out of the tunnel as it comes in from the wire. Only what is
 * exactly as another node of ours sends it, and goes to a pod of this node; all
 * else is left to the kernel's device, whose own hook judges it by name.
 */
#pragma once

#include <linux/ip.h>
#include <linux/ipv6.h>

#include "common.h"
#include "encap.h"
#include "enter.h"
#include "remote.h"

/* linux/bpf.h since 6.3. */
#define ROOM_DECAP_L3_IPV4 (1ULL << 7)
#define ROOM_DECAP_L3_IPV6 (1ULL << 8)

/* Return: the reference of the node that has this address on the wire, or 0. */
inline_fn __u32 tunnel_peer(const struct addr *a)
{
	__u32 *ref = bpf_map_lookup_elem(&mst_tunnel_peers_v1, a);

	return ref ? *ref : 0;
}

/* Where the outer headers of a packet in the tunnel end, and whose they are. */
struct outer {
	struct addr src;
	struct addr dst;
	__u32 length; /* bytes before UDP, without the link header */
	__u8 ecn;
	bool ipv6;
};

inline_fn bool outer_parse(struct __sk_buff *skb, struct outer *o)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.protocol != IPPROTO_UDP || ip.ihl != 5 ||
		    ip.frag_off & bpf_htons(0x3fff))
			return false;
		addr_from_ipv4(&o->src, ip.saddr);
		addr_from_ipv4(&o->dst, ip.daddr);
		o->ecn = ip.tos & ECN_MASK;
		o->length = sizeof(ip);
	} else {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.nexthdr != IPPROTO_UDP)
			return false;
		__builtin_memcpy(&o->src, &ip.saddr, sizeof(o->src));
		__builtin_memcpy(&o->dst, &ip.daddr, sizeof(o->dst));
		o->ecn = ip.flow_lbl[0] >> 4 & ECN_MASK;
		o->length = sizeof(ip);
		o->ipv6 = true;
	}
	return true;
}

/* The inner packet's destination; false when it is no IP packet. */
inline_fn bool inner_destination(struct __sk_buff *skb, __u32 off, __be16 proto, struct addr *dst)
{
	__be32 ip;

	if (proto == bpf_htons(ETH_P_IPV6))
		return !bpf_skb_load_bytes(skb, off + 24, dst, sizeof(*dst));
	if (proto != bpf_htons(ETH_P_IP) || bpf_skb_load_bytes(skb, off + 16, &ip, sizeof(ip)))
		return false;
	addr_from_ipv4(dst, ip);
	return true;
}

/* The congestion mark that a router set outside is to be carried inside: the kernel's device does. */
inline_fn bool plain_tunnel(const struct outer *o, const struct tunnel_tail *tail, const struct node_config *n)
{
	return tail->udp.dest == n->port && o->ecn != ECN_CE && tail->vxlan.flags == bpf_htonl(VXLAN_HAS_VNI) &&
	       tail->vxlan.vni == bpf_htonl(n->vni << 8) && addr_equal(&o->dst, o->ipv6 ? &n->ip6 : &n->ip4);
}

inline_fn int tunnel_strip(struct __sk_buff *skb, const struct outer *o, __be16 proto)
{
	bool ipv6 = proto == bpf_htons(ETH_P_IPV6);
	__s32 length = o->length + sizeof(struct tunnel_tail);
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;

	if (ipv6 != o->ipv6) /* kernels before 6.3 refuse it */
		flags |= ipv6 ? ROOM_DECAP_L3_IPV6 : ROOM_DECAP_L3_IPV4;
	if (bpf_skb_adjust_room(skb, -length, BPF_ADJ_ROOM_MAC, flags))
		return -1;
	return ipv6 == o->ipv6 ? 0 : bpf_skb_store_bytes(skb, 2 * ETH_ALEN, &proto, sizeof(proto), 0);
}

/**
 * untunnel - strip the tunnel's headers from a packet to a pod of this node
 * @ref: set to the node that sent it
 *
 * Return: the endpoint; 0: the packet is as it was, and not for here.
 */
slow_fn __u32 untunnel(struct __sk_buff *skb, __u32 *ref)
{
	struct node_config *n = node_config();
	struct tunnel_tail tail;
	struct outer o = {};
	struct addr inner;
	__u32 id;

	if (!n || !n->overlay || !ref || !outer_parse(skb, &o))
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + o.length, &tail, sizeof(tail)) || !plain_tunnel(&o, &tail, n))
		return 0;
	*ref = tunnel_peer(&o.src);
	if (!*ref || !inner_destination(skb, ETH_HLEN + o.length + sizeof(tail), tail.eth.h_proto, &inner))
		return 0;
	id = endpoint_of(&inner);
	if (!id || !behind_host_end(id) || tunnel_strip(skb, &o, tail.eth.h_proto))
		return 0;
	return id;
}
