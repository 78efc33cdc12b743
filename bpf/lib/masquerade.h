/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The outside: what the routing table leads out by a NIC of the node's (mst_wear), and
 * is of no other node's pods. What it leads to the node itself, or by another device,
 * is the host's stack's.
 *
 * Masquerade: towards it a pod's flow wears the address that its node has at that
 * NIC, of the edge's, where the pod's group says so (for all but what it calls inside).
 * The flow is translated at the pod's host end, and its answers at the NIC
 * (edge.bpf.c), both past the stack, whose connection tracking would else cost each
 * packet of the node's. A pod that keeps its address goes past the stack as well: for
 * its flow the outside is as another node (REMOTE_OUTSIDE).
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "edge.h"
#include "fib.h"
#include "plan.h"
#include "remote.h"
#include "source.h"
#include "wear.h"

/* Return: the group in which an endpoint is masqueraded, 0: in none. */
inline_fn __u32 masquerade_group(__u32 id)
{
	__u32 *group = bpf_map_lookup_elem(&mst_masquerade_v1, &id);

	return group ? *group : 0;
}

/* Whether programs forward to the outside. @keeps: under the pod's own address */
inline_fn bool masquerade_forwards(const struct addr *dst, bool keeps)
{
	struct node_config *n = keeps ? NULL : node_config();

	return keeps ? remote_of(REMOTE_OUTSIDE) && !link_local(dst) : n && n->flags & NODE_MASQUERADE;
}

/* Whether a group's pods keep their address towards a destination: by what is said of the group, or of all. */
inline_fn bool masquerade_inside(__u32 group, const struct addr *a)
{
	struct inside_key key = { .prefixlen = 32 + 128, .group = group, .addr = *a };

	if (net_holds(bpf_map_lookup_elem(&mst_inside_v1, &key), a))
		return true;
	key.group = INSIDE_ALL;
	return net_holds(bpf_map_lookup_elem(&mst_inside_v1, &key), a);
}

/* Return: ifindex of the device that the routing table names for a flow, 0: none. @t: with the pod's address */
slow_fn __u32 masquerade_device(struct __sk_buff *skb, const struct tuple *t, __u8 proto)
{
	struct bpf_fib_lookup fib = { .ifindex = skb->ifindex, .l4_protocol = proto, .sport = t->sport, .dport = t->dport };
	struct way_kept *kept = edge_way_of_ends(skb, t, proto);
	long found;

	if (kept && way_holds(kept, 1)) /* of one that is not kept the MTU is 0 */
		return kept->ifindex;
	fib_addrs(&fib, &t->src, &t->dst);
	found = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (found == BPF_FIB_LKUP_RET_SUCCESS && kept) {
		struct way way = { .ifindex = fib.ifindex, .mtu = fib.mtu_result };

		__builtin_memcpy(way.macs, fib.dmac, ETH_ALEN);
		__builtin_memcpy(way.macs + ETH_ALEN, fib.smac, ETH_ALEN);
		way_keep(kept, &way);
	}
	return fib_forwards(found) ? fib.ifindex : 0;
}

/* Whether a pod's packet is for the node to route: on a bridge there may be other routers. */
inline_fn bool masquerade_routes(struct __sk_buff *skb, const struct pkt *p, const struct endpoint *self)
{
	static const __u8 unknown[ETH_ALEN] = {};
	struct ethhdr *eth = packet(skb);

	if (!(self->flags & EP_HOST_END) || link_local(&p->t.src) || (void *)(eth + 1) > packet_end(skb))
		return false;
	return mac_equal(eth->h_dest, self->node_mac) || mac_equal(self->node_mac, unknown);
}

/**
 * masquerade_port - a port for a flow that has its address
 * Return: enum drop_reason.
 */
global_fn int masquerade_port(struct __sk_buff *skb, struct pkt *p, struct plan *plan, __u32 now)
{
	struct edge_config *c = edge_config(EDGE_WIRE);
	__u32 try;

	if (!p || !plan || !c)
		return REASON_NAT_PORTS;
	try = wear_first_port(p);
	for (int i = 0; i < NAT_PORT_TRIES; i++, try = bpf_get_prandom_u32()) {
		plan->post.sport = i < NAT_PORT_TRIES / 4 ? wear_port(c, try) : wear_more(try);
		if (p->proto == IPPROTO_ICMP || p->proto == IPPROTO_ICMPV6) /* both are the identifier */
			plan->post.dport = plan->post.sport;
		if (wear_free(skb, p, &plan->post, now, i)) {
			wear_mark(plan->post.sport);
			return REASON_NONE;
		}
	}
	return REASON_NAT_PORTS;
}

/* Whether a packet has a port, or an echo's identifier, by which its answers are told from those of other pods. */
inline_fn bool has_port(const struct pkt *p)
{
	if (p->proto == IPPROTO_ICMP || p->proto == IPPROTO_ICMPV6)
		return p->t.sport == p->t.dport;
	return p->proto == IPPROTO_TCP || p->proto == IPPROTO_UDP || p->proto == IPPROTO_SCTP;
}

/**
 * masquerade - plan how a new flow from a pod goes to the outside, if that is where it goes
 * @plan: judged; gets the address that the other end sees, but no port, or the outside as its other end
 *
 * Return: enum drop_reason.
 */
global_fn int masquerade(struct __sk_buff *skb, struct pkt *p, struct plan *plan)
{
	struct wear *wear;
	struct addr *own;
	__u32 group, device;
	bool keeps;

	if (!p || !plan)
		return REASON_NAT_PORTS;
	group = masquerade_group(skb->cb[CB_ENDPOINT]);
	keeps = !group || masquerade_inside(group, &plan->post.dst);
	if (!keeps && of_tunnel(p->proto, plan->post.dport)) /* whoever masquerades */
		return REASON_TUNNEL_PORT;
	if (!masquerade_forwards(&plan->post.dst, keeps))
		return REASON_NONE;
	device = masquerade_device(skb, &plan->post, p->proto);
	wear = bpf_map_lookup_elem(&mst_wear_v1, &device);
	if (!wear)
		return REASON_NONE;
	if (keeps) {
		if (wear->answers)
			plan->responder.generation = REMOTE_OUTSIDE;
		return REASON_NONE;
	}
	own = p->ipv6 ? &wear->ip6 : &wear->ip4;
	if (addr_is_zero(own))
		return REASON_NONE;
	if (!has_port(p))
		return REASON_NAT_FAILED;
	if ((p->proto == IPPROTO_TCP || p->proto == IPPROTO_SCTP) &&
	    (p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) != TCP_SYN)
		return REASON_MIDSTREAM_NAT;
	plan->post.src = *own;
	plan->post.pad = device;
	plan->role = CT_PRE_NAT;
	plan->flags |= CT_EDGE | CT_MASQUERADE;
	return REASON_NONE;
}

/**
 * masquerade_worn_out - whether the node has no longer the address that a flow wears, or now has a tunnel that it leads to
 *
 * Nobody answers there, or whoever takes the node's packets from it. What can begin anew does, as if there had been no flow.
 */
slow_fn bool masquerade_worn_out(const struct ct_entry *e, __u8 proto)
{
	return e->flags & CT_MASQUERADE && e->role == CT_PRE_NAT &&
	       ((!worn_at(EDGE_WIRE, &e->other.src) && !(address_flags(&e->other.src) & SVC_NODE)) || of_tunnel(proto, e->other.dport));
}
