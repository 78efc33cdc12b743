// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The node's NIC. A packet to a pod behind a host end goes straight to it, by
 * the shared program that judges what enters a pod, or without it when its flow
 * has just passed; out of the tunnel first, where it came by one. All else, the
 * host's own traffic above all, goes on as if nothing were here.
 */
#include "lib/common.h"
#include "lib/enter.h"
#include "lib/untunnel.h"
#include "lib/wire_fast.h"

/* The network destination of a frame; false when it has none that pods could have. */
inline_fn bool destination(struct __sk_buff *skb, struct addr *dst)
{
	void *data = packet(skb), *end = packet_end(skb);

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		const struct iphdr *ip = data + ETH_HLEN;

		if ((void *)(ip + 1) > end)
			return false; /* short of a header: the stack pulls it, or drops it */
		addr_from_ipv4(dst, ip->daddr);
		return true;
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		const struct ipv6hdr *ip = data + ETH_HLEN;

		if ((void *)(ip + 1) > end)
			return false;
		__builtin_memcpy(dst, &ip->daddr, sizeof(*dst));
		return true;
	}
	return false;
}

/* Cheap, and false for almost all of the host's own traffic. */
inline_fn bool maybe_tunnel(struct __sk_buff *skb)
{
	void *data = packet(skb), *end = packet_end(skb);
	const struct ipv6hdr *ip6 = data + ETH_HLEN;
	const struct iphdr *ip4 = data + ETH_HLEN;

	if ((void *)(ip6 + 1) > end) /* a packet in the tunnel is longer */
		return false;
	return (skb->protocol == bpf_htons(ETH_P_IP) ? ip4->protocol : ip6->nexthdr) == IPPROTO_UDP;
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

SEC("tc")
int from_netdev(struct __sk_buff *skb)
{
	struct addr dst;
	bool ours;

	if (skb->pkt_type != PACKET_HOST || skb->vlan_present || !destination(skb, &dst))
		return NEXT;
	ours = of_this_node(&dst);
	if (ours ? !maybe_tunnel(skb) : !maybe_endpoint(&dst))
		return NEXT;
	skb->cb[CB_TUNNEL] = ours;
	return node_call(skb, NODE_PROG_NETDEV_IN);
}

/* What may be for a pod, or in the tunnel. */
SEC("tc")
int netdev_in(struct __sk_buff *skb)
{
	struct addr dst;
	int verdict;
	__u32 id;

	if (skb->cb[CB_TUNNEL])
		return untunnel(skb);
	verdict = wire_fast(skb);
	if (verdict != FAST_NO)
		return verdict;
	id = destination(skb, &dst) ? endpoint_of(&dst) : 0;
	return id ? enter_pod(skb, id, 0) : NEXT;
}

char __license[] SEC("license") = "Dual BSD/GPL";
