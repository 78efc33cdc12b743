/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Both ends of a flow as they were when it was judged, and judging it anew when
 * one of them has changed: what policy forbids then is cut, for both ends, and
 * stays cut for who sends in its midst.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "policy.h"
#include "remote.h"

/* An end is as it was when the flow was judged. */
inline_fn bool end_current(const struct ct_end *end)
{
	struct endpoint *ep;

	if (!end->endpoint)
		return in_pod || !end->generation || remote_of(end->generation);
	ep = endpoint_slot(end->endpoint);
	return ep && ep->generation == end->generation;
}

inline_fn bool ends_current(const struct ct_entry *e)
{
	return end_current(&e->opener) && end_current(&e->responder);
}

/**
 * error_current - whether what was judged of both ends of a flow holds, as either half of it has that
 * @at: where @e lies
 *
 * Each half is judged anew by the packets that it sees: a packet by one, an ICMP error about it finds the other.
 */
global_fn int error_current(const struct ct_key *at, const struct ct_entry *e)
{
	struct tuple mine = {};
	struct ct_entry *half;
	struct ct_key key;

	if (!at || !e)
		return 0;
	if (ends_current(e))
		return 1;
	half = e->role == CT_DIRECT ? NULL : ct_half(at, e, now_seconds(), &key, &mine);
	return half && half->opener.endpoint == e->opener.endpoint &&
	       half->responder.endpoint == e->responder.endpoint && ends_current(half);
}

/* The generation is read before policy is asked: what changes meanwhile is seen by the next packet. */
inline_fn void end_set_id(struct ct_end *end, __u32 id)
{
	struct endpoint *ep = id ? endpoint_slot(id) : NULL;

	end->endpoint = 0;
	end->generation = 0;
	if (!ep || !ep->generation)
		return;
	end->generation = ep->generation;
	end->endpoint = id;
}

inline_fn void end_set(struct ct_end *end, const struct addr *a)
{
	end_set_id(end, endpoint_of(a));
	if (!end->endpoint && !in_pod) /* whose packets find their way by themselves */
		end->generation = remote_find(a);
}

/* The same of a flow's opener: it may be another node itself, with nobody's network around its address. */
inline_fn void end_set_opener(struct ct_end *end, const struct addr *a)
{
	struct addr key = *a;

	end_set(end, a);
	if (!end->endpoint && !end->generation && !in_pod)
		end->generation = node_with(&key);
}

/* An end that was outside still is, if nobody has its address now. */
global_fn int end_stays_outside(struct ct_end *end, __u32 endpoint, __u32 generation)
{
	if (end && !endpoint && generation == REMOTE_OUTSIDE && !end->endpoint && !end->generation && remote_of(REMOTE_OUTSIDE))
		end->generation = REMOTE_OUTSIDE;
	return 0;
}

/**
 * end_of_hook - an end that no table knows, of a packet at an endpoint's hook
 * @id: the endpoint
 *
 * It is the endpoint that is asked about. But only a link-local address, which is in no table, is the endpoint's own:
 * what is for many, as a broadcast to a network is, would lead its flow to the last of them.
 *
 * Return: whom policy is to be asked about.
 */
inline_fn __u32 end_of_hook(struct ct_end *end, const struct addr *a, __u32 id)
{
	if (!id || end->endpoint)
		return end->endpoint;
	if (link_local(a))
		end_set_id(end, id);
	return id;
}

/**
 * judge_again - an end of the flow changed: find both anew, and ask policy about them
 * @at: where its entry lies
 * @id: the endpoint that this program serves; 0: none
 * @opener: it is the flow's opener
 *
 * A flow that is cut keeps its entry, so that its other end cannot open it again from there: for as long as anybody sends,
 * where that may be sent again (TCP, SCTP); else for a while, for the other end may have something to say of its own.
 *
 * Return: enum drop_reason.
 */
global_fn int judge_again(struct ct_entry *e, const struct ct_key *at, __u32 id, bool opener)
{
	struct judgment *j = judgment_begin();
	const struct addr *opened, *answered;
	struct ct_end opener_now, responder_now;
	__be16 port;
	int reason;
	bool hi;

	if (!e || !at || !j)
		return REASON_NONE;
	hi = e->flags & CT_ORIGIN_IS_HI;
	opened = hi ? &at->hi : &at->lo;
	answered = hi ? &at->lo : &at->hi;
	port = hi ? at->lo_port : at->hi_port;
	/* The opener as the client's own tuple names it, the responder as the backend's. */
	j->opener = e->role == CT_POST_NAT ? e->other.src : *opened;
	j->responder = e->role == CT_PRE_NAT ? e->other.dst : *answered;
	j->port = bpf_ntohs(e->role == CT_PRE_NAT ? e->other.dport : port);
	j->proto = at->proto;
	j->from_node = !!(e->flags & CT_FROM_NODE);
	end_set_opener(&opener_now, &j->opener);
	end_set(&responder_now, &j->responder);
	if (!in_pod)
		end_stays_outside(&responder_now, e->responder.endpoint, e->responder.generation);
	j->opener_id = end_of_hook(&opener_now, &j->opener, opener ? id : 0);
	j->responder_id = end_of_hook(&responder_now, &j->responder, opener ? 0 : id);
	reason = policy_judge();
	if (!reason && e->flags & CT_EITHER) {
		judgment_turn(bpf_ntohs(hi ? at->hi_port : at->lo_port));
		reason = policy_judge();
	}
	if (!reason) { /* not before: to another CPU's packet the flow would be judged, and allowed */
		e->opener = opener_now;
		e->responder = responder_now;
		return REASON_NONE;
	}
	if (e->opener.endpoint != CT_END_CUT || at->proto == IPPROTO_TCP || at->proto == IPPROTO_SCTP) {
		near_elsewhere(at, e, now_seconds() + CT_CUT_LIFETIME);
		e->expires = now_seconds() + CT_CUT_LIFETIME;
	}
	e->opener.endpoint = CT_END_CUT;
	e->responder.endpoint = CT_END_CUT;
	return reason;
}

/**
 * cut_alone - what the backend sees of a flow that policy cut becomes a cut flow of its own: the client's half ends
 * @e: the client's half
 */
global_fn int cut_alone(const struct ct_key *at, const struct ct_entry *e)
{
	__u32 now = now_seconds();
	struct tuple mine = {};
	struct ct_entry *half;
	struct ct_key key;

	if (!at || !e)
		return 0;
	half = ct_half(at, e, now, &key, &mine);
	if (!half)
		return 0;
	half->opener.endpoint = CT_END_CUT;
	half->responder.endpoint = CT_END_CUT;
	half->role = CT_DIRECT;
	__builtin_memset(&half->other, 0, sizeof(half->other));
	near_elsewhere(&key, half, now + CT_CUT_LIFETIME);
	half->expires = now + CT_CUT_LIFETIME;
	return 0;
}

/**
 * denied_anew - whether policy denies an opener that begins its flow anew
 * @at: where its entry @e lies
 * @id: the endpoint that this program serves
 * @sends: it is the opener
 *
 * Of an answered flow policy is asked first what it has not been asked since it changed: if it denies the new flow, it
 * has cut the old one, and that one's entry stays. But a client's half may begin anew with another backend.
 *
 * Return: enum drop_reason.
 */
global_fn int denied_anew(struct ct_entry *e, const struct ct_key *at, __u32 id, bool sends)
{
	int reason;

	if (!e || !at || (e->role != CT_PRE_NAT && !e->seen_reply) || e->flags & CT_EDGE || ends_current(e))
		return REASON_NONE;
	reason = judge_again(e, at, id, sends);
	if (e->role != CT_PRE_NAT)
		return reason;
	if (reason)
		cut_alone(at, e);
	return REASON_NONE;
}

/**
 * begin_anew - end the flow that a packet begins anew, unless policy denies the new one
 * Return: enum drop_reason.
 */
slow_fn int begin_anew(struct flow *f, __u32 id, bool sends)
{
	int reason = f->reply ? REASON_NONE : denied_anew(f->e, &f->key, id, sends);

	if (!reason)
		ct_forget(f);
	return reason;
}
