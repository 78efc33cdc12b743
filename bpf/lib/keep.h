/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What was decided at a pod's hook is kept for the packets that follow (fast.h), as far as it will hold. */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "ends.h"
#include "fast.h"
#include "plan.h"

/**
 * flow_current - whether what was judged of both ends still holds
 * @mine: the end that this program's endpoint is
 * @id: of that endpoint; the flow may have been judged while it was not there
 */
inline_fn bool flow_current(const struct ct_entry *e, const struct ct_end *mine, __u32 id)
{
	return mine->endpoint == id && ends_current(e);
}

inline_fn bool ends(const struct pkt *p)
{
	return p->tcp_flags & (TCP_FIN | TCP_RST);
}

/**
 * denied_end - whether policy denies a packet that ends() a flow, before either half of it learns of that
 * @e: its entry
 * @at: where that lies
 * @id: the endpoint that this program serves
 * @sends: it has sent the packet
 *
 * Return: enum drop_reason.
 */
global_fn int denied_end(struct ct_entry *e, const struct ct_key *at, const struct pkt *p, __u32 id, bool sends)
{
	bool opener;

	if (!e || !at || !p)
		return REASON_NONE;
	opener = !!(key_src_is_hi(at, &p->t) ^ (e->flags & CT_ORIGIN_IS_HI)) != sends;
	return flow_current(e, opener ? &e->opener : &e->responder, id) ? REASON_NONE : judge_again(e, at, id, opener);
}

/**
 * keep_known - keep what was decided about a packet of a known flow for those that follow
 * @how: enum fast_flag, as far as the hook tells
 *
 * The entry must see the opener's next packet after the answer: of TCP it sees each until then
 * (FAST_OPENING), of UDP, which may never be answered, none, and what is kept is forgotten then.
 */
inline_fn void keep_known(struct __sk_buff *skb, const struct pkt *p, const struct ct_entry *e, const struct ct_key *at,
			  bool reply, const struct tuple *to, __u32 how)
{
	bool opener_here = reply == !!(how & FAST_TO_POD);
	const struct ct_end *mine = opener_here ? &e->opener : &e->responder;

	if (!p->shape || at->scope != CT_SCOPE_FLOW || e->closing_orig | e->closing_reply ||
	    mine->endpoint != skb->cb[CB_ENDPOINT])
		return;
	if (p->proto == IPPROTO_TCP && !reply && e->opening &&
	    !(e->opening == CT_OPENING_IN_PLACE && e->role == CT_DIRECT))
		how |= FAST_OPENING;
	if (e->flags & CT_VIA_STACK)
		how |= FAST_VIA_STACK;
	if (to)
		how |= FAST_TRANSLATE;
	fast_keep(skb, p, opener_here ? &e->responder : &e->opener, to, how);
}

/* The same of a new TCP flow: its opener's next packet is near. */
inline_fn void keep_new(struct __sk_buff *skb, const struct pkt *p, const struct plan *plan, __u32 how)
{
	const struct ct_end *mine = how & FAST_TO_POD ? &plan->responder : &plan->opener;

	if (!p->shape || p->proto != IPPROTO_TCP || plan->scope != CT_SCOPE_FLOW ||
	    mine->endpoint != skb->cb[CB_ENDPOINT])
		return;
	if (!plan->in_place || plan->role != CT_DIRECT)
		how |= FAST_OPENING;
	if (plan->flags & CT_VIA_STACK)
		how |= FAST_VIA_STACK;
	if (plan->role != CT_DIRECT)
		how |= FAST_TRANSLATE;
	fast_keep(skb, p, how & FAST_TO_POD ? &plan->opener : &plan->responder,
		  how & FAST_TRANSLATE ? &plan->post : NULL, how);
}
