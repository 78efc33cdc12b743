/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The edge: clients outside that use a Service by an address of this node. A
 * flow of theirs is translated at the NIC and goes straight to its backend.
 * Unless the Service keeps the client's address, it wears the node's, so that
 * the answer finds back here whichever node the backend is on. The program at a
 * local backend's interface turns the answer back and sends it to the wire; of
 * a remote backend, the NIC's ingress does, or that of the tunnel's device; of
 * the node's own sockets its egress; of pods with a child of the NIC, either, or
 * the program inside the pod where the node's stack would come first.
 * Pods of other nodes come by the tunnel where there is one: then its device is
 * what the NIC is to others.
 *
 * The door is the same for the node itself, whose SCTP sockets no program meets
 * before they send: a pair of devices. What the node sends to a Service is routed
 * into the inner end and translated where it comes out of the outer one; answers
 * are sent out of the outer end, and so reach the node by the device that its
 * route to the Service names.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "drop.h"
#include "deliver.h"
#include "fast.h"
#include "fib.h"
#include "icmp_error.h"
#include "lb.h"
#include "nat.h"
#include "nic.h"
#include "parse.h"
#include "refuse.h"
#include "way.h"

#define WAY_OF_ENDS 0xff     /* no flow's protocol: a slot of the short way that keeps a way for many of two ends' */
#define WAY_HOOK (1u << 29)  /* and no hook of its own */

/* Where the way between two addresses is kept, from one device on: a connection's first packet goes the way that others
 * of these ends and its protocol, by which IPv6 chooses among next hops, have just gone. */
slow_fn struct way_kept *edge_way_of_ends(struct __sk_buff *skb, const struct tuple *t, __u8 proto)
{
	struct tuple ends = { .src = t->src, .dst = t->dst, .dport = proto, .pad = WAY_HOOK | skb->ifindex };
	struct fast_flow *fast = fast_slot(BACK_SLOT(fast_place(tuple_hash(&ends), skb->ifindex)));

	if (!fast)
		return NULL;
	if (fast->proto != WAY_OF_ENDS || fast->t.pad != ends.pad || !tuple_equal(&fast->t, &ends))
		fast_claim_way(fast, &ends, ends.pad, WAY_OF_ENDS);
	return &fast->at.way;
}

/**
 * edge_opened - what the opener of a flow uses, of which a packet has been translated
 * @t: set, as struct ct_entry's other
 *
 * Return: whether there is such a flow, and the packet is the opener's.
 */
global_fn int edge_opened(struct pkt *p, struct tuple *t)
{
	struct flow f = { .now = now_seconds() };

	if (!p || !t)
		return 0;
	ct_find(&f, p, CT_SCOPE_FLOW);
	if (!f.e || f.reply || f.e->role != CT_POST_NAT)
		return 0;
	*t = f.e->other;
	return 1;
}

/* A masqueraded flow that leads out by another device than the one whose address it wears ends, as the kernel's own
 * masquerade ends it: its next packet begins anew, under the address of that device. */
global_fn int edge_forget(struct pkt *p)
{
	struct flow f = { .now = now_seconds() };

	if (!p)
		return 0;
	ct_find(&f, p, CT_SCOPE_FLOW);
	ct_forget(&f);
	return 0;
}

/**
 * edge_stuck - what a pod sent and has no way out, becomes again what the pod sent: the node's stack says why
 * @p: translated
 */
global_fn int edge_stuck(struct __sk_buff *skb, struct pkt *p)
{
	struct tuple t = {};

	if (!p)
		return TC_ACT_SHOT;
	if (!edge_opened(p, &t))
		return drop(skb, REASON_NO_ROUTE, DIR_EDGE);
	return translate(skb, p, &t, false) ? drop(skb, REASON_NAT_FAILED, DIR_EDGE) : NEXT;
}

/**
 * edge_too_long - what is longer than its way takes becomes again what its sender sent, who is to hear of it
 * @p: translated: a client's packet, an answer to one, or a masqueraded pod's
 *
 * The node's stack could not say it: to it, either of the first two is for the node.
 *
 * Return: a tc verdict or EDGE_TOO_LONG.
 */
global_fn int edge_too_long(struct __sk_buff *skb, struct pkt *p)
{
	struct flow f = { .now = now_seconds() };

	if (!p)
		return TC_ACT_SHOT;
	ct_find(&f, p, CT_SCOPE_FLOW);
	if (!f.e || f.e->role != (f.reply ? CT_PRE_NAT : CT_POST_NAT))
		return drop(skb, REASON_TOO_LONG, DIR_EDGE);
	if (!may_answer(skb, true, f.now) || translate(skb, p, &f.e->other, f.reply))
		return drop(skb, REASON_TOO_LONG, DIR_EDGE);
	count_drop(skb, REASON_TOO_LONG, DIR_EDGE);
	event_stopped(skb, REASON_TOO_LONG, DIR_EDGE, EVENT_REFUSED, f.now);
	return EDGE_TOO_LONG;
}

/**
 * edge_send - out to wherever the kernel's routing table says, or by the way that its flow's packets, or others
 * between the same ends, have just gone
 * @p: as it leaves
 *
 * Return: a tc verdict, EDGE_STUCK, EDGE_STRAYS or EDGE_TOO_LONG.
 */
global_fn int edge_send(struct __sk_buff *skb, struct pkt *p)
{
	struct bpf_fib_lookup fib = {};
	struct way_kept *kept, *ends = NULL;
	struct tuple from = {};
	struct way way = {};
	__u32 length;

	if (!p)
		return TC_ACT_SHOT;
	length = wire_length(skb, p);
	kept = way_slot(skb);
	if (!kept || !way_holds(kept, length)) {
		bool hold;

		ends = edge_way_of_ends(skb, &p->t, p->proto);
		hold = ends && way_holds(ends, length);
		if (kept && hold)
			*kept = *ends;
		kept = hold ? ends : NULL;
	}
	if (kept) {
		if (!link_write(skb, kept->macs))
			return drop(skb, REASON_DELIVER, DIR_EDGE);
		redirect_note(skb, kept->ifindex, REDIRECT_NEIGH);
		return bpf_redirect(kept->ifindex, 0);
	}
	from.src = p->t.src;
	from.sport = p->t.sport;
	if (p->masqueraded) /* the routing table leads it as the pod's (masquerade_device) */
		edge_opened(p, &from);
	if (length <= MAX_IP_LENGTH)
		fib.tot_len = length;
	fib.l4_protocol = p->proto;
	fib.sport = from.sport;
	fib.dport = p->t.dport;
	fib_addrs(&fib, &from.src, &p->t.dst);
	if (!fib_route(skb, &fib, &way)) {
		if (!fib.tot_len || fib.mtu_result >= length) /* which the lookup sets where that is why */
			return p->masqueraded ? EDGE_STUCK : drop(skb, REASON_NO_ROUTE, DIR_EDGE);
		/* Nor could the stack say it of a pod's: it forwards what is longer than a path that it has learned of. */
		skb->cb[CB_REASON] = fib.mtu_result;
		return EDGE_TOO_LONG;
	}
	if (p->masqueraded && ((from.pad && from.pad != way.ifindex) || !bpf_map_lookup_elem(&mst_wear_v1, &way.ifindex)))
		return EDGE_STRAYS;
	if (ends)
		way_keep(ends, &way);
	return way_out(skb, &way);
}

/**
 * edge_home - to the node's own socket, through the door
 * @p: as it arrives
 *
 * Both ends of the door have the same link address, which the kernel takes for every neighbour there.
 *
 * Return: a tc verdict.
 */
global_fn int edge_home(struct __sk_buff *skb, struct pkt *p)
{
	struct edge_config *c = edge_config(EDGE_WIRE);
	struct bpf_redir_neigh next = {};

	if (!p)
		return TC_ACT_SHOT;
	if (!c || !c->door)
		return drop(skb, REASON_NO_ROUTE, DIR_EDGE);
	if (p->ipv6) {
		next.nh_family = AF_INET6;
		__builtin_memcpy(next.ipv6_nh, &p->t.dst, sizeof(next.ipv6_nh));
	} else {
		next.nh_family = AF_INET;
		next.ipv4_nh = p->t.dst.words[3];
	}
	redirect_note(skb, c->door, REDIRECT_NEIGH);
	return bpf_redirect_neigh(c->door, &next, sizeof(next), 0);
}

/* What edge_send could not send. @self: the pod that did, NULL: it came by this device */
inline_fn int edge_unsent(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, int verdict)
{
	__u32 mtu = skb->cb[CB_REASON];

	if (verdict == EDGE_STUCK)
		return edge_stuck(skb, p);
	if (verdict == EDGE_STRAYS) {
		edge_forget(p);
		return drop(skb, REASON_NO_ROUTE, DIR_EDGE);
	}
	verdict = edge_too_long(skb, p);
	if (verdict != EDGE_TOO_LONG)
		return verdict;
	if (p->ipv6 ? too_long_ipv6(skb, p, mtu) : too_long_ipv4(skb, p, mtu))
		return TC_ACT_SHOT;
	if (self)
		return reflect(skb, self);
	redirect_note(skb, skb->ifindex, REDIRECT_EGRESS);
	return bpf_redirect(skb->ifindex, 0);
}

/* Inside a pod there is no edge: as to_send_out. @self: as edge_unsent's */
inline_fn int edge_sent(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, int verdict)
{
	if (!in_pod && verdict == EDGE_SEND) {
		verdict = edge_send(skb, p);
		return verdict <= EDGE_STUCK ? edge_unsent(skb, p, self, verdict) : verdict;
	}
	return !in_pod && verdict == EDGE_HOME ? edge_home(skb, p) : verdict;
}

/* Where answers of a flow from outside go. */
inline_fn int edge_way(const struct ct_entry *e)
{
	return e->flags & CT_FROM_NODE ? EDGE_HOME : EDGE_SEND;
}

/* Whether a pod's answers of this flow leave by the edge. Inside a pod they cannot. */
inline_fn bool to_edge(const struct ct_entry *e)
{
	return !in_pod && e->role == CT_POST_NAT && e->flags & CT_EDGE;
}
