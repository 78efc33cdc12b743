// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The node's NIC. A packet to a pod behind a host end goes straight to it, by
 * the shared program that judges what enters a pod, or without it when its flow
 * has just passed; out of the tunnel first, where it came by one. All else, the
 * host's own traffic above all, goes on as if nothing were here.
 */
#include "lib/common.h"
#include "lib/enter.h"
#include "lib/nic.h"
#include "lib/untunnel.h"
#include "lib/wire_fast.h"

SEC("tc")
int from_netdev(struct __sk_buff *skb)
{
	struct addr dst;
	int proto;
	bool tunnel;

	if (unlikely(skb->pkt_type != PACKET_HOST || of_vlan(skb)))
		return NEXT;
	proto = destination(skb, &dst);
	if (unlikely(proto == NO_DESTINATION))
		return NEXT;
	tunnel = unlikely(proto == IPPROTO_UDP) && of_this_node(&dst);
	if (!tunnel && !maybe_endpoint(&dst))
		return NEXT;
	skb->cb[CB_TUNNEL] = tunnel ? WIRE_TUNNEL : WIRE_POD;
	return node_call(skb, NODE_PROG_NETDEV_IN);
}

/* What may be for a pod, or in the tunnel. Where the edge has called, what is neither goes back to it. */
SEC("tc")
int netdev_in(struct __sk_buff *skb)
{
	__u32 what = skb->cb[CB_TUNNEL], id;
	struct addr dst;
	int verdict;

	skb->cb[CB_ENDPOINT] = 0; /* as long as it is at no pod's hook */
	if (what == WIRE_TUNNEL)
		return untunnel(skb);
	verdict = wire_fast(skb);
	if (likely(verdict != FAST_NO))
		return verdict;
	id = destination(skb, &dst) != NO_DESTINATION ? endpoint_of(&dst) : 0;
	if (id && behind_host_end(id))
		return enter_pod(skb, id, 0);
	return what == WIRE_OR_EDGE ? node_call(skb, NODE_PROG_EDGE_IN) : NEXT;
}

char __license[] SEC("license") = "Dual BSD/GPL";
