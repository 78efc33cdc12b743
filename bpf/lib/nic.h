/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What the small programs at the node's NICs ask of each packet. */
#pragma once

#include <linux/ip.h>
#include <linux/ipv6.h>

#include "common.h"
#include "lb.h"
#include "remote.h"

#define NO_DESTINATION -1
#define VLAN_ID_MASK 0xfff

/* Whether a frame is a VLAN's, whose device has it next. A tag of VLAN 0 is but a priority: the stack takes it off and the
 * frame for this device's, but only behind the programs. */
inline_fn bool of_vlan(struct __sk_buff *skb)
{
	return unlikely(skb->vlan_present) && (skb->vlan_tci & VLAN_ID_MASK || bpf_skb_vlan_pop(skb));
}

/* The network destination of a frame. Return: the protocol behind, or NO_DESTINATION: none that pods or Services could have. */
inline_fn int destination(struct __sk_buff *skb, struct addr *dst)
{
	void *data = packet(skb), *end = packet_end(skb);
	const struct ipv6hdr *ip6 = data + ETH_HLEN;
	const struct iphdr *ip4 = data + ETH_HLEN;
	__u32 protocol = skb->protocol;

	if (likely(protocol == bpf_htons(ETH_P_IP))) {
		if (unlikely((void *)(ip4 + 1) > end))
			return NO_DESTINATION; /* short of a header: the stack pulls it, or drops it */
		addr_from_ipv4(dst, ip4->daddr);
		return ip4->protocol;
	}
	if (protocol != bpf_htons(ETH_P_IPV6) || (void *)(ip6 + 1) > end)
		return NO_DESTINATION;
	__builtin_memcpy(dst, &ip6->daddr, sizeof(*dst));
	return ip6->nexthdr;
}

/* Whether it is for the node itself, by its address between nodes: no pod's, so nobody need look. */
inline_fn bool of_this_node(const struct addr *a)
{
	struct node_config *n = node_config();

	return n && (addr_equal(a, &n->ip4) || addr_equal(a, &n->ip6));
}

/* Whether some endpoint may have the address. */
inline_fn bool maybe_endpoint(const struct addr *a)
{
	__u32 bit = endpoint_bit(a), word = bit / 64;
	__u64 *had = bpf_map_lookup_elem(&mst_endpoint_bits_v1, &word);

	return !had || *had >> (bit % 64) & 1;
}

inline_fn struct edge_config *edge_config(__u32 side)
{
	__u32 key = side; /* enum edge_side */

	return bpf_map_lookup_elem(&mst_edge_v2, &key);
}

/* Whether new flows wear an address there. */
inline_fn bool worn_at(__u32 side, const struct addr *a)
{
	struct edge_config *c = edge_config(side);

	return c && (addr_equal(a, &c->ip4) || addr_equal(a, &c->ip6));
}

/* Whether flows wear a port, any moment. */
inline_fn bool worn_port(__be16 dport)
{
	struct edge_config *c = edge_config(EDGE_WIRE);

	return !c || (__u16)(bpf_ntohs(dport) - c->port_first) < c->port_count;
}

/* Of what goes to the node itself, only node ports and the ports that flows wear are the edge's. Whether
 * a port may be one of these: some frontend has it, or once had, or it is of those that are worn. */
inline_fn bool edge_port(__be16 dport)
{
	return worn_port(dport) || told_port(bpf_ntohs(dport));
}
