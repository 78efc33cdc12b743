/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What comes in at the edge and is a Service's, or of a flow that is: a packet of a
 * known flow, of a new one, or an ICMP error; and answers that are turned back.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "deliver.h"
#include "drop.h"
#include "edge.h"
#include "edge_plan.h"
#include "fast.h"
#include "icmp_error.h"
#include "lb.h"
#include "nat.h"
#include "nic.h"
#include "nobody.h"
#include "parse.h"
#include "refuse.h"
#include "remote.h"

inline_fn int edge_drop(struct __sk_buff *skb, __u32 reason)
{
	skb->cb[CB_REASON] = reason;
	return EDGE_DROP;
}

inline_fn int edge_done(struct __sk_buff *skb, struct pkt *p, int verdict)
{
	if (verdict == EDGE_INTO) {
		bpf_tail_call(skb, &mst_programs_v1, PROG_TO_POD_EDGE);
		verdict = edge_drop(skb, REASON_NO_PROGRAM);
	}
	/* As a router does: else what Services of two nodes lead to each other would go round for ever. */
	if (verdict == EDGE_SEND && !from_door && !hop_take(skb, p))
		verdict = edge_drop(skb, REASON_HOP_LIMIT);
	if (verdict == EDGE_TOO_LONG)
		return edge_unsent(skb, p, NULL, verdict);
	return verdict == EDGE_DROP ? drop(skb, skb->cb[CB_REASON], DIR_EDGE) : edge_sent(skb, p, NULL, verdict);
}

/**
 * edge_keep - keep what was decided about a packet for those of its flow that follow
 * @p: not yet translated
 * @to: what it is translated to
 * @id: the endpoint that has it then, 0: another node, or a host
 * @how: enum fast_flag
 */
global_fn int edge_keep(struct __sk_buff *skb, const struct pkt *p, const struct tuple *to, __u32 id, __u32 how)
{
	struct endpoint *ep = id ? endpoint_slot(id) : NULL;
	struct ct_end peer = { .endpoint = id };

	if (!p || !to || !p->shape || skb->pkt_type != PACKET_HOST)
		return 0;
	if (ep && ep->generation && !(ep->flags & EP_IN_POD) &&
	    (addr_equal(&to->dst, &ep->ip4) || addr_equal(&to->dst, &ep->ip6)))
		peer.generation = ep->generation;
	else if (id)
		return 0;
	return fast_keep(skb, p, &peer, to, how | FAST_AT_EDGE | FAST_TRANSLATE);
}

/* Answers that only the NIC can turn back. @where: bits of enum edge_turn. */
inline_fn void edge_turn(__u32 where)
{
	struct facts *known = facts();

	if (known && (known->edge_turn & where) != where)
		__sync_fetch_and_or(&known->edge_turn, where);
}

inline_fn bool edge_turns(__u32 where)
{
	struct facts *known = facts();

	return known && known->edge_turn & where;
}

/* Into the pod behind a host end, past that: its program is called here. */
inline_fn int edge_into(struct __sk_buff *skb, const struct endpoint *to, __u32 id)
{
	if (too_long(skb, to->mtu)) {
		skb->cb[CB_REASON] = to->mtu;
		return EDGE_TOO_LONG;
	}
	if (!link_write(skb, to->mac))
		return edge_drop(skb, REASON_DELIVER);
	skb->cb[CB_ENDPOINT] = id;
	redirect_note(skb, to->ifindex, REDIRECT_PEER);
	return EDGE_INTO;
}

/**
 * edge_deliver - hand a translated packet on
 * @id: the endpoint that should have it, 0 for none on this node
 *
 * Return: a tc verdict, EDGE_SEND, EDGE_HOME, EDGE_INTO, EDGE_TOO_LONG or EDGE_DROP.
 */
slow_fn int edge_deliver(struct __sk_buff *skb, struct pkt *p, __u32 id)
{
	struct endpoint *to = id ? endpoint_slot(id) : NULL;

	if (to && (!to->generation || !(addr_equal(&p->t.dst, &to->ip4) || addr_equal(&p->t.dst, &to->ip6)))) {
		id = endpoint_of(&p->t.dst); /* another pod has the number by now */
		to = id ? endpoint_slot(id) : NULL;
	}
	if (!to || !to->generation) {
		if (!of_node(&p->t.dst))
			return EDGE_SEND;
		return from_door ? EDGE_HOME : NEXT;
	}
	if (to->flags & EP_IN_POD) {
		edge_turn(EDGE_TURN_OUT | EDGE_TURN_IN);
		if (to->parent != skb->ifindex)
			return EDGE_SEND;
		return bpf_skb_store_bytes(skb, 0, to->mac, ETH_ALEN, 0) ? edge_drop(skb, REASON_DELIVER) : NEXT;
	}
	return edge_into(skb, to, id);
}

/* Let a packet go the way that its flow's packets have just gone. Return: a verdict as edge_deliver's, or FAST_NO. */
global_fn int edge_fast(struct __sk_buff *skb, struct pkt *p)
{
	__u32 slot;
	struct fast_flow *fast;
	struct endpoint *to;
	int reason;

	if (!p)
		return FAST_NO;
	slot = tuple_hash(&p->t);
	p->generation = fast_generation(slot, NULL);
	if (!fast_shape(p))
		return FAST_NO;
	fast = fast_find(p, fast_edge_hook(skb->ifindex), &slot);
	if (!fast)
		return FAST_NO;
	to = fast->peer ? endpoint_slot(fast->peer) : NULL;
	if (!fast_peer_current(fast, to) || !fast_seen(fast, p))
		return FAST_NO;
	reason = translate(skb, p, &fast->to, false);
	if (reason)
		return edge_drop(skb, reason);
	if (to)
		return edge_into(skb, to, fast->peer);
	way_slot_note(skb, slot);
	return EDGE_SEND;
}

/* Drops a client's packet and tells the client. */
slow_fn int edge_refuse(struct __sk_buff *skb, struct pkt *p, __u32 reason, __u32 now)
{
	if (!answer(skb, p, reason, DIR_EDGE, now))
		return TC_ACT_SHOT;
	redirect_note(skb, skb->ifindex, REDIRECT_EGRESS);
	return bpf_redirect(skb->ifindex, 0);
}

/* Whether a port may be of a range that the edge had before, of which flows still wear some: all of it was told. */
inline_fn bool worn_before(__be16 dport)
{
	__u16 port = bpf_ntohs(dport);

	return told_port(port) && (told_port(port - 1) || told_port(port + 1));
}

/* Whether a port that is nobody's now stays so for a while, and no flow is left there. */
inline_fn bool stays_nobodys(__be16 dport)
{
	return !worn_port(dport) && !worn_more(dport) && !worn_before(dport) && !gone_port(dport);
}

/* Whether an address is of a pod whose packets pass a host end of this node. */
inline_fn bool of_host_end(const struct addr *a)
{
	__u32 id = endpoint_of(a);
	struct endpoint *ep = id ? endpoint_slot(id) : NULL;

	return ep && ep->generation && ep->flags & EP_HOST_END;
}

/* Whether a packet is of the tunnel between nodes: that is no Service's, whoever names the node's address and this port. */
inline_fn bool to_tunnel(const struct pkt *p)
{
	struct node_config *n = of_tunnel(p->proto, p->t.dport) ? node_config() : NULL;

	return n && (addr_equal(&p->t.dst, &n->ip4) || addr_equal(&p->t.dst, &n->ip6));
}

/**
 * edge_worn_out - whether a flow from outside wears an address that the node has no longer: as masquerade_worn_out()
 * @t: what its client sends
 */
slow_fn bool edge_worn_out(const struct ct_entry *e, const struct tuple *t)
{
	const struct addr *worn = &e->other.src;

	if (e->role != CT_PRE_NAT || e->flags & (CT_MASQUERADE | CT_FROM_NODE) || addr_equal(worn, &t->src))
		return false;
	return !worn_at(EDGE_WIRE, worn) && !worn_at(EDGE_TUNNEL, worn) && !(address_flags(worn) & SVC_NODE);
}

/* Whether a packet to a port of the node's, of no known flow, may be an answer to the node's own socket: what opens no
 * connection, and of UDP, where nothing does, what a socket is connected for. */
inline_fn bool answers_node(struct __sk_buff *skb, const struct pkt *p)
{
	if (p->proto != IPPROTO_UDP)
		return !opens(p);
	return host_connected(skb, &p->t, p);
}

/**
 * edge_new - a packet from outside that belongs to no known flow
 * @generation: nobody_generation(), as it was when the packet came
 */
slow_fn int edge_new(struct __sk_buff *skb, struct pkt *p, __u32 generation, __u32 now)
{
	struct edge_plan plan = { .post = p->t };
	struct service *s;
	__u16 address;
	int reason;

	if (p->proto != IPPROTO_TCP && p->proto != IPPROTO_UDP && p->proto != IPPROTO_SCTP)
		return NEXT;
	if (!from_door && (to_tunnel(p) || link_local(&p->t.src))) /* whose answers no routing table leads back */
		return NEXT;
	if (from_door && !of_node(&p->t.src)) /* an ipvlan-l3 pod's: to the kernel, the node has sent it */
		return EDGE_SEND;
	s = service_find(&p->t.dst, p->t.dport, p->proto, from_door ? SCOPE_ANY : SCOPE_OUTSIDE, &address);
	if (!s && address & SVC_REFUSE)
		return edge_refuse(skb, p, REASON_SERVICE_PORT, now);
	if (!s && p->shape && !from_door && stays_nobodys(p->t.dport))
		nobody_keep(p, generation);
	if (!s) /* as if there were no Service, nor a door */
		return from_door ? EDGE_SEND : NEXT;
	if (!from_door && of_host_end(&p->t.src)) /* it would have come by that */
		return edge_drop(skb, REASON_WIRE_SPOOFED);
	/* To the node, it may be of a connection that the node opened from that very port. The node's own stack would not
	 * take it, from itself. */
	if (address & SVC_NODE && !from_door && answers_node(skb, p))
		return NEXT;
	reason = service_refuses(s, p);
	if (!reason)
		reason = edge_plan_backend(skb, p, s, &plan);
	if (reason == REASON_NO_BACKEND || reason == REASON_MIDSTREAM_NAT)
		return edge_refuse(skb, p, reason, now);
	if (!reason)
		reason = edge_source(skb, p, &plan, now);
	if (!reason)
		reason = edge_enter(p, &plan, now);
	if (!reason && p->proto == IPPROTO_TCP && !plan.host)
		edge_keep(skb, p, &plan.post, plan.endpoint, FAST_OPENING);
	if (!reason)
		reason = translate(skb, p, &plan.post, false);
	if (reason)
		return edge_drop(skb, reason);
	if (!from_door && !plan.wear && !plan.endpoint) /* the node itself, or a pod that mustang does not know */
		edge_turn(EDGE_TURN_OUT);
	return plan.endpoint || plan.host ? edge_deliver(skb, p, plan.endpoint) : EDGE_SEND;
}

/**
 * edge_reply - a backend's packet goes back to the client outside
 * @pre: the tuple that the client uses
 * @way: EDGE_SEND or EDGE_HOME
 *
 * Return: a tc verdict, @way or EDGE_DROP.
 */
slow_fn int edge_reply(struct __sk_buff *skb, struct pkt *p, const struct tuple *pre, int way)
{
	struct tuple t;
	int reason;

	tuple_reverse(&t, pre);
	if (way == EDGE_SEND)
		edge_keep(skb, p, &t, 0, 0);
	reason = translate(skb, p, &t, false);
	return reason ? edge_drop(skb, reason) : way;
}

/**
 * edge_error_reply - an ICMP error about a flow from outside, from its backend's side
 * @pre: the tuple that the client uses
 */
slow_fn int edge_error_reply(struct __sk_buff *skb, struct pkt *p, struct quote *q, const struct tuple *pre)
{
	int reason = translate_error(skb, p, q, pre);

	if (reason)
		return edge_drop(skb, reason);
	p->t.dst = pre->src;
	return q->keep_outer ? NEXT : EDGE_SEND;
}

/**
 * edge_back - an answer to a pod that is masqueraded
 * @pre: the tuple that the pod uses
 * @id: of the pod's endpoint
 */
slow_fn int edge_back(struct __sk_buff *skb, struct pkt *p, const struct tuple *pre, __u32 id, bool keep)
{
	struct tuple t;
	int reason;

	tuple_reverse(&t, pre);
	if (!endpoint_of(&t.dst))
		return edge_drop(skb, REASON_NO_ENDPOINT);
	if (keep)
		edge_keep(skb, p, &t, id, 0);
	reason = translate(skb, p, &t, false);
	return reason ? edge_drop(skb, reason) : edge_deliver(skb, p, id);
}

/* A packet of a flow from outside, either way. */
slow_fn int edge_known(struct __sk_buff *skb, struct pkt *p, struct flow *f)
{
	struct ct_entry *e = f->e;
	struct tuple other;
	int reason;

	if (!e)
		return NEXT;
	other = e->other;
	if (e->role == CT_POST_NAT && f->reply && e->flags & CT_MASQUERADE)
		return edge_back(skb, p, &other, e->opener.endpoint, !(e->closing_orig | e->closing_reply));
	if (e->role == CT_POST_NAT && f->reply)
		return edge_reply(skb, p, &other, edge_way(e));
	if (e->role != CT_PRE_NAT || f->reply)
		return NEXT;
	if (!(e->closing_orig | e->closing_reply) && (e->responder.endpoint || !of_node(&other.dst)))
		edge_keep(skb, p, &other, e->responder.endpoint, e->opening && p->proto == IPPROTO_TCP ? FAST_OPENING : 0);
	reason = translate(skb, p, &other, false);
	return reason ? edge_drop(skb, reason) : edge_deliver(skb, p, e->responder.endpoint);
}

/* An ICMP error from outside about a flow from outside, either way. */
slow_fn int edge_error(struct __sk_buff *skb, struct pkt *p, __u32 now)
{
	struct flow f = { .now = now };
	struct quote q = {};
	struct tuple other;
	int reason;

	if (error_flow(skb, p, &f, &q) || !f.e || !(f.e->flags & CT_EDGE))
		return NEXT;
	other = f.e->other;
	q.keep_outer = edge_way(f.e) == EDGE_HOME;
	if (f.e->role == CT_POST_NAT && f.reply && f.e->flags & CT_MASQUERADE) {
		reason = endpoint_of(&other.src) ? translate_error(skb, p, &q, &other) : REASON_NO_ENDPOINT;
		if (reason)
			return edge_drop(skb, reason);
		p->t.dst = other.src;
		return edge_deliver(skb, p, f.e->opener.endpoint);
	}
	if (f.e->role == CT_POST_NAT && f.reply)
		return edge_error_reply(skb, p, &q, &other);
	if (f.e->role != CT_PRE_NAT || f.reply)
		return NEXT;
	/* It quotes what went to the client; the backend sent that from its own address. */
	tuple_reverse(&other, &f.e->other);
	q.worn_outer = by_tunnel(&other.src);
	reason = translate_error(skb, p, &q, &other);
	if (reason)
		return edge_drop(skb, reason);
	p->t.dst = other.src;
	return edge_deliver(skb, p, f.e->responder.endpoint);
}
