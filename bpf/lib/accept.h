/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What enters a pod (to_pod): a packet of a known flow, of a new one, an ICMP error,
 * or a fragment before its first, at the pod's own hook or at the NIC (from_wire).
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "drop.h"
#include "ends.h"
#include "frag.h"
#include "icmp_error.h"
#include "keep.h"
#include "lb.h"
#include "nat.h"
#include "near_path.h"
#include "nobody.h"
#include "parse.h"
#include "plan.h"
#include "policy.h"
#include "source.h"
#include "wire.h"

/**
 * accept_error - an ICMP error on its way into a pod
 *
 * Return: enum drop_reason, or WIRE_TO_STACK: at the NIC, about no flow of those that pass there.
 */
slow_fn int accept_error(struct __sk_buff *skb, struct pkt *p, __u32 id, __u32 now)
{
	struct flow f = { .now = now };
	struct quote q = {};
	struct tuple t;
	int reason = error_flow(skb, p, &f, &q);

	if (!reason && f.e && !error_current(&f.key, f.e))
		reason = REASON_ICMP_ERROR_FLOW;
	if (from_wire && (reason || !f.e || f.e->flags & CT_VIA_STACK))
		return WIRE_TO_STACK;
	if (reason || !f.e)
		return reason;
	if (f.e->role == CT_POST_NAT && f.reply && f.e->opener.endpoint == id) {
		t = f.e->other;
		reason = translate_error(skb, p, &q, &t);
	}
	return reason;
}

/* Whether a packet without a flow is a Service's answer, translated before its client's half was forgotten
 * (docs/removal.md): as a flow of its own it would lead what the client sends next to nowhere. */
inline_fn bool late_answer(const struct pkt *p)
{
	__u16 address;

	if (p->proto == IPPROTO_TCP && (p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN)
		return false;
	return told_port(bpf_ntohs(p->t.sport)) && service_find(&p->t.src, p->t.sport, p->proto, SCOPE_ANY, &address);
}

/**
 * accept_new - the first packet of a flow that reaches a pod through its own hook
 */
slow_fn int accept_new(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, __u32 now)
{
	struct plan plan = { .post = p->t, .role = CT_DIRECT, .flags = in_pod || from_wire ? 0 : CT_VIA_STACK };
	__u32 asked = from_wire ? nobody_generation() : 0;
	int reason = 0;

	if (from_node(skb, &p->t.src, self))
		plan.flags |= CT_FROM_NODE;
	if (from_wire)
		end_set_opener(&plan.opener, &p->t.src);
	else
		end_set(&plan.opener, &p->t.src);
	if (from_wire)
		reason = wire_sender(&plan.opener, skb->cb[CB_REMOTE]);
	if (from_wire && reason)
		return wire_verdict(skb, p, reason);
	if (!reason)
		reason = admit(p, &plan, skb->cb[CB_ENDPOINT]);
	if (!from_wire && !reason && late_answer(p))
		return into_pod(skb, p, self, skb->cb[CB_ENDPOINT]);
	plan.near = from_wire && p->shape && p->proto == IPPROTO_TCP;
	if (!reason && plan.near)
		pair_keep(&plan, p, asked);
	if (!reason)
		reason = create_flow(p, &plan, now);
	fast_forget_plan(p, &plan);
	if (reason)
		return drop(skb, reason, DIR_TO_POD);
	event_opened(skb, p, &plan, DIR_TO_POD, now);
	if (plan.near)
		near_keep(&p->t, p->tables);
	else
		keep_new(skb, p, &plan, FAST_TO_POD);
	return into_pod(skb, p, self, skb->cb[CB_ENDPOINT]);
}

/* At the NIC: whether a known flow's packet may be of its sender, and goes on from here. Before it
 * changes the flow's entry. */
slow_fn int wire_known(struct __sk_buff *skb, struct pkt *p, struct flow *f, __u32 id)
{
	const struct ct_end *from = f->reply ? &f->e->responder : &f->e->opener;
	__u32 ref = skb->cb[CB_REMOTE];
	int reason;

	if (f->e->flags & CT_VIA_STACK)
		return WIRE_TO_STACK;
	/* What was of no node when the flow was judged, has come to be one's that is reached by the tunnel. */
	if (!flow_current(f->e, f->reply ? &f->e->opener : &f->e->responder, id) || (ref && of_no_node(from))) {
		reason = judge_again(f->e, &f->key, id, f->reply);
		if (reason)
			return reason;
	}
	return wire_sender(from, ref);
}

/* What comes of a known flow's packet that does not go on from here. The stack's are left to it for a while
 * without asking. */
slow_fn int wire_known_verdict(struct __sk_buff *skb, struct pkt *p, struct flow *f, int judged)
{
	if (judged == WIRE_TO_STACK && f->e && !skb->cb[CB_REMOTE])
		keep_known(skb, p, f->e, &f->key, f->reply, NULL, FAST_TO_POD | FAST_VIA_STACK);
	return wire_verdict(skb, p, judged);
}

/**
 * accept_known - a packet to a pod that belongs to a known flow
 *
 * A function of its own, as forward_known: 6.1 counts frames in steps of 32 bytes.
 */
static __noinline int accept_known(struct __sk_buff *skb, struct pkt *p, struct flow *f, struct endpoint *self)
{
	__u32 id = skb->cb[CB_ENDPOINT];
	struct ct_entry *e = f->e;
	bool translated = false;
	struct tuple t;
	int reason = 0;

	if (!e)
		return drop(skb, REASON_CT_FULL, DIR_TO_POD);
	if (!flow_current(e, f->reply ? &e->opener : &e->responder, id))
		reason = judge_again(e, &f->key, id, f->reply);
	if (reason)
		return drop(skb, reason, DIR_TO_POD);
	if (e->role == CT_POST_NAT && f->reply && e->opener.endpoint == id) {
		tuple_reverse(&t, &e->other);
		translated = true;
	}
	if (from_wire && translated && unlikely(too_long(skb, self->mtu)))
		return wire_to_stack(skb, p); /* as its sender sent it, who is to be told */
	if (from_wire && e->near)
		near_known(p);
	else
		keep_known(skb, p, e, &f->key, f->reply, translated ? &t : NULL, FAST_TO_POD);
	if (translated) {
		reason = translate(skb, p, &t, false);
		if (reason)
			return drop(skb, reason, DIR_TO_POD);
	}
	return into_pod(skb, p, self, id);
}

/**
 * accept_orphan - a fragment whose datagram's first one has not come, on its way into a pod
 *
 * It is gathered, and comes back by the host's stack behind its first. Where nothing gathers the pod
 * puts datagrams together, and none without the first one, which is judged: what comes too early may
 * wait for it there. But not in an isolated pod, whose memory is not everybody's.
 */
slow_fn int accept_orphan(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, __u32 now)
{
	__u32 id = skb->cb[CB_ENDPOINT];
	struct endpoint_policy *policy = policy_of(id);
	struct ct_end from = {};
	int reason = 0;

	end_set_opener(&from, &p->t.src);
	if (from_wire) {
		reason = wire_sender(&from, skb->cb[CB_REMOTE]);
		if (reason)
			return wire_verdict(skb, p, reason);
	}
	if (!in_pod && frag_gathers())
		return frag_gather(skb, p, now, 0);
	if (!policy || policy->ingress)
		return drop(skb, REASON_FRAG_NO_FIRST, DIR_TO_POD);
	if (!from_wire)
		count_to_pod(id, skb->len);
	return into_pod(skb, p, self, id);
}
