/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a pod sends (from_pod): a packet of a known flow, of a new one, or an ICMP
 * error, once it is known that the short ways do not serve it.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "deliver.h"
#include "drop.h"
#include "edge.h"
#include "ends.h"
#include "fib.h"
#include "icmp_error.h"
#include "keep.h"
#include "lb.h"
#include "masquerade.h"
#include "nat.h"
#include "near_path.h"
#include "nobody.h"
#include "parse.h"
#include "plan.h"
#include "refuse.h"

/* The endpoint the packet goes to: NULL when that is not on this node, or the kernel must carry it. */
inline_fn struct endpoint *next_endpoint(const struct ct_entry *e, bool reply, __u32 *id)
{
	const struct ct_end *end = reply ? &e->opener : &e->responder;

	*id = end->endpoint;
	if (!*id || (reply && e->flags & CT_VIA_STACK))
		return NULL;
	return endpoint_slot(*id);
}

/* The node that the packet goes to: 0 when the kernel must carry it. */
inline_fn __u32 next_remote(const struct ct_entry *e, bool reply)
{
	const struct ct_end *end = reply ? &e->opener : &e->responder;

	return end->endpoint || e->flags & CT_VIA_STACK ? 0 : end->generation;
}

/* What the client sees in the shadow is another flow's tuple, too: its own hook, where that comes behind
 * this one, could not tell whose answer it is, were it turned back here. */
inline_fn bool left_to_client(const struct ct_entry *e, const struct endpoint *self, const struct endpoint *to)
{
	return hook_follows && e->role == CT_POST_NAT && e->shadow && to != self;
}

/* Where the reply's tuple is turned back depends on which hook sees it last before the client, or before
 * the node's stack, which would masquerade an answer to a client outside as a flow of the pod's own. */
inline_fn bool reply_translated_here(const struct ct_entry *e, struct endpoint *self, struct endpoint *to)
{
	if (in_pod && e->flags & CT_EDGE)
		return self->flags & EP_NODE_ROUTES;
	if (!to)
		return false;
	if (left_to_client(e, self, to))
		return false;
	return in_pod ? to == self || siblings(self, to) : !!(to->flags & EP_HOST_END);
}

/* A packet of a pod's that is masqueraded goes out as by a router. */
slow_fn int forward_masqueraded(struct __sk_buff *skb, struct pkt *p, const struct endpoint *self, const struct ct_entry *e,
				const struct ct_key *at)
{
	int reason;

	p->masqueraded = 1;
	wear_mark(e->other.sport); /* the engine may have written other ports' marks over it meanwhile */
	keep_known(skb, p, e, at, false, &e->other, FAST_MASQUERADE);
	if (!hop_take(skb, p))
		return leave(skb, self);
	reason = translate(skb, p, &e->other, false);
	return reason ? drop(skb, reason, DIR_FROM_POD) : EDGE_SEND;
}

/**
 * forward_known - a packet from a pod that belongs to a known flow
 * @e: its entry
 * @at: where that lies
 *
 * A function of the verifier's own: it is read once, not for each table where the entry may lie.
 */
global_fn int forward_known(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, struct ct_entry *e,
			    const struct ct_key *at)
{
	bool translated = false, reply;
	struct endpoint *to;
	struct tuple t;
	int reason = 0, verdict;
	__u32 id, remote;

	if (!p || !self || !e || !at)
		return drop(skb, REASON_CT_FULL, DIR_FROM_POD);
	reply = key_src_is_hi(at, &p->t) ^ (e->flags & CT_ORIGIN_IS_HI);
	if (!flow_current(e, reply ? &e->responder : &e->opener, skb->cb[CB_ENDPOINT]))
		reason = judge_again(e, at, skb->cb[CB_ENDPOINT], !reply);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	if (!in_pod && !reply && e->flags & CT_MASQUERADE)
		return forward_masqueraded(skb, p, self, e, at);
	to = next_endpoint(e, reply, &id);
	if (e->role == CT_PRE_NAT && !reply) {
		t = e->other;
		translated = true;
	} else if (e->role == CT_POST_NAT && reply && (to_edge(e) || reply_translated_here(e, self, to))) {
		tuple_reverse(&t, &e->other);
		translated = true;
	}
	if (!in_pod && translated && reply && to && too_long(skb, to->mtu)) /* as its sender sent it, whom the stack tells */
		return leave(skb, self);
	remote = to || (reply && to_edge(e)) ? 0 : next_remote(e, reply);
	if (reply && to && left_to_client(e, self, to)) {
		verdict = deliver(skb, p, self, to, id, NULL);
		unvouch(skb);
		return verdict;
	}
	if (e->near && remote && e->role == CT_DIRECT) {
		skb->cb[CB_WAY] = near_known(p);
		return send_out(skb, p, self, remote);
	}
	if (e->near && (to || remote)) {
		if (!to || alike(self, to))
			near_known(p);
	} else if (!(reply && to_edge(e)))
		keep_known(skb, p, e, at, reply, translated ? &t : NULL, to ? FAST_DELIVER : 0);
	else if (edge_way(e) == EDGE_SEND)
		keep_known(skb, p, e, at, reply, &t, FAST_BY_EDGE);
	if (translated)
		reason = translate(skb, p, &t, false);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	if (reply && to_edge(e))
		return edge_way(e);
	return to ? deliver(skb, p, self, to, id, NULL) : send_out(skb, p, self, remote);
}

/* Whether Services of this packet's kind are this hook's to translate: of SCTP no socket's program knows. */
inline_fn bool serves(const struct endpoint *self, const struct pkt *p)
{
	return self->flags & EP_SERVICE_TC || (p->proto == IPPROTO_SCTP && self->flags & EP_SERVICE_SOCKET);
}

/* Whether a Service has come since the flow began, as one to an address like any other: while nobody
 * has answered there, its opener is led to the Service with the next try. */
slow_fn bool served_since(const struct flow *f, const struct pkt *p, const struct endpoint *self)
{
	struct service_key key = { .addr = p->t.dst, .port = p->t.dport, .proto = p->proto };

	if (!f->e || f->e->role != CT_DIRECT || f->reply || !serves(self, p))
		return false;
	if (p->proto != IPPROTO_UDP && (p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	return service_at(&key, SCOPE_ANY);
}

/**
 * forward_new - the first packet of a flow from a pod
 * @scope: CT_SCOPE_SHADOW when a translated flow occupies the packet's own tuple
 */
slow_fn int forward_new(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, __u8 scope, __u32 now)
{
	struct plan plan = { .post = p->t, .role = CT_DIRECT, .scope = scope,
			     .opener = { .endpoint = skb->cb[CB_ENDPOINT], .generation = self->generation } };
	__u32 asked = nobody_generation();
	struct endpoint *to;
	int reason = 0;

	if (scope == CT_SCOPE_SHADOW) {
		if (p->proto != IPPROTO_TCP && p->proto != IPPROTO_UDP && p->proto != IPPROTO_SCTP)
			return drop(skb, REASON_NAT_FAILED, DIR_FROM_POD);
		plan.role = CT_PRE_NAT;
	} else if (serves(self, p)) {
		reason = plan_service(p, &plan);
	}
	if (reason == REASON_NO_BACKEND || reason == REASON_SERVICE_PORT || reason == REASON_MIDSTREAM_NAT)
		return refuse(skb, p, self, reason, now);
	if (!reason)
		reason = admit(p, &plan, 0);
	to = plan.responder.endpoint ? endpoint_slot(plan.responder.endpoint) : NULL;
	if (!reason && of_tunnel(p->proto, plan.post.dport) && node_with(&plan.post.dst)) /* whose address it may yet wear */
		reason = REASON_TUNNEL_PORT;
	if (!reason && !in_pod && !to && !plan.responder.generation && scope == CT_SCOPE_FLOW && masquerade_routes(skb, p, self))
		reason = masquerade(skb, p, &plan);
	p->masqueraded = !in_pod && !!(plan.flags & CT_MASQUERADE);
	plan.near = p->shape && p->proto == IPPROTO_TCP && scope == CT_SCOPE_FLOW &&
		    (to ? alike(self, to) : !!plan.responder.generation);
	if (reason == REASON_MIDSTREAM_NAT)
		return refuse(skb, p, self, reason, now);
	if (!reason && p->masqueraded)
		reason = masquerade_port(skb, p, &plan, now);
	else if (!reason && plan.role == CT_PRE_NAT)
		reason = nat_port(&plan, p->proto, now);
	if (!reason && plan.near)
		pair_keep(&plan, p, asked);
	plan.near |= p->masqueraded && p->shape && p->proto == IPPROTO_TCP;
	if (!reason)
		reason = create_flow(p, &plan, now);
	fast_forget_plan(p, &plan);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	event_opened(skb, p, &plan, DIR_FROM_POD, now);
	if (plan.near && !p->masqueraded)
		near_new(skb, p, &plan);
	else
		keep_new(skb, p, &plan, to ? FAST_DELIVER : p->masqueraded ? FAST_MASQUERADE : 0);
	if (p->masqueraded && !hop_take(skb, p))
		return leave(skb, self);
	if (plan.role == CT_PRE_NAT)
		reason = translate(skb, p, &plan.post, false);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	if (p->masqueraded)
		return EDGE_SEND;
	return to ? deliver(skb, p, self, to, plan.responder.endpoint, NULL) : send_out(skb, p, self, plan.responder.generation);
}

/**
 * to_be_routed - whether the node would forward what neighbours tell each other
 *
 * To itself, and to whom a bridge leads, it goes as it is.
 */
slow_fn bool to_be_routed(struct __sk_buff *skb, struct pkt *p, const struct endpoint *self)
{
	struct bpf_fib_lookup fib = { .ifindex = skb->ifindex };

	if (!p->ipv6 || p->t.dst.bytes[0] == 0xff || link_local(&p->t.dst) || !masquerade_routes(skb, p, self))
		return false;
	fib_addrs(&fib, &p->t.src, &p->t.dst);
	return fib_forwards(bpf_fib_lookup(skb, &fib, sizeof(fib), 0));
}

/**
 * leaves_link - whether a packet from a link-local address is for somebody beyond the sender's link
 *
 * No router lets it through (RFC 4291 2.5.6), and what is handed over past the stack is routed: to a pod, but for one that
 * a bridge leads to, to another node's, to a Service's backend. What else is to come of it, the stack says.
 */
slow_fn bool leaves_link(struct __sk_buff *skb, const struct pkt *p, const struct endpoint *self)
{
	struct endpoint *to;
	__u16 address = 0;
	__u32 id;

	if (!(self->flags & EP_HOST_END) || p->kind == PKT_CONTROL || link_local(&p->t.dst))
		return false;
	id = endpoint_of(&p->t.dst);
	to = id ? endpoint_slot(id) : NULL;
	if (to)
		return to != self && (!addressed_to(skb, to->mac) || mac_equal(to->mac, self->node_mac)); /* or none has one */
	return remote_find(&p->t.dst) || service_find(&p->t.dst, p->t.dport, p->proto, SCOPE_ANY, &address) || address & SVC_REFUSE;
}

/**
 * forward_error - an ICMP error from a pod follows the flow that it is about
 */
slow_fn int forward_error(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, __u32 now)
{
	struct flow f = { .now = now };
	struct quote q = {};
	struct endpoint *to;
	struct tuple t;
	__u32 id;
	int reason = error_flow(skb, p, &f, &q);

	if (!reason && f.e && !error_current(&f.key, f.e))
		reason = REASON_ICMP_ERROR_FLOW; /* what it is about was judged on its way, but not as things are now */
	if (!reason && f.e && error_of_others(&f, skb->cb[CB_ENDPOINT]))
		reason = REASON_ICMP_ERROR_FLOW;
	if (reason || !f.e)
		return drop(skb, reason, DIR_FROM_POD);
	to = next_endpoint(f.e, f.reply, &id);
	if (f.e->role == CT_PRE_NAT && !f.reply) {
		tuple_reverse(&t, &f.e->other);
		reason = translate_error(skb, p, &q, &t);
	} else if (f.e->role == CT_POST_NAT && f.reply && (to_edge(f.e) || reply_translated_here(f.e, self, to))) {
		t = f.e->other;
		q.keep_outer = to_edge(f.e) && edge_way(f.e) == EDGE_HOME;
		reason = translate_error(skb, p, &q, &t);
	}
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	if (f.reply && to_edge(f.e)) {
		p->t.dst = t.src;
		return q.keep_outer ? NEXT : EDGE_SEND;
	}
	if (!in_pod && f.e->flags & CT_MASQUERADE) {
		p->t.src = t.dst;
		p->t.dst = t.src;
		return EDGE_SEND;
	}
	if (!to || !to->generation)
		return NEXT;
	reason = deliver(skb, p, self, to, id, NULL);
	if (f.reply && left_to_client(f.e, self, to))
		unvouch(skb);
	return reason;
}
