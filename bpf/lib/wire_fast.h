/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The short way (near.h, fast.h) from the NIC into a pod: whose packet it is lies
 * in its flow's entry, or in what is kept of the flow, so that neither its receiver
 * nor its sender is looked for. A SYN of a pair that has just been judged is
 * entered at once.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "fast.h"
#include "near_flow.h"
#include "remote.h"
#include "wire.h"

/* Where a packet from the wire goes, as its flow's entry says, what is kept of the flow, or (neither) of its pair. */
struct wire_way {
	struct near_flow *near;
	struct fast_flow *fast;
	__u32 id;   /* of the endpoint that gets it */
	__u32 ref;  /* of the node that its sender is on */
	bool reply; /* of a flow that lies near */
};

/* Of a SYN: its pair has just been judged. */
inline_fn bool wire_find_pair(const struct pkt *p, struct wire_way *w)
{
	struct pair *pair = pair_of(&p->t, 0);
	struct endpoint *to;

	if (!pair)
		return false;
	w->id = pair->responder;
	w->ref = pair->opener_generation;
	to = endpoint_slot(w->id);
	return to && to->generation == pair->responder_generation;
}

/* Its flow lies near, and holds. */
inline_fn bool wire_find_near(const struct pkt *p, struct wire_way *w)
{
	struct near_place *place = near_place_of(&p->t);
	const struct ct_end *to, *from;
	struct near_flow *n;

	w->near = n = place ? near_find(place, &p->t, &w->reply) : NULL;
	if (unlikely(!n))
		return false;
	w->reply ^= n->e.flags & CT_ORIGIN_IS_HI;
	to = w->reply ? &n->e.opener : &n->e.responder;
	from = w->reply ? &n->e.responder : &n->e.opener;
	w->id = to->endpoint;
	w->ref = from->generation;
	return near_holds(n, tables_generation()) && !from->endpoint &&
	       (n->e.role == CT_DIRECT || (n->e.role == CT_POST_NAT && w->reply));
}

/* Something is kept of its flow. */
inline_fn bool wire_find_fast(struct pkt *p, struct wire_way *w)
{
	struct endpoint *to;
	__u32 hash, slot;

	if (!fast_shape(p))
		return false;
	hash = slot = tuple_hash(&p->t);
	w->fast = fast_at(p, FAST_WIRE_HOOK, &slot);
	if (!w->fast)
		return false;
	w->id = w->fast->peer;
	w->ref = w->fast->peer_generation;
	to = endpoint_slot(w->id);
	if (!to)
		return false;
	p->generation = fast_generation(hash, to);
	return fast_holds(w->fast, p);
}

/**
 * wire_find - what is known of a packet's flow at the NIC, and holds
 * @p: as glance leaves it, of the packet inside the tunnel if there is one
 * @w: zeroed
 *
 * Return: whether anything is. Whether that node may send it so, is left to the caller.
 */
inline_fn bool wire_find(struct pkt *p, struct wire_way *w)
{
	if (likely(p->proto == IPPROTO_TCP && p->shape)) {
		if (unlikely((p->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN))
			return p->shape == SHAPE_OPENS && wire_find_pair(p, w);
		if (likely(wire_find_near(p, w)))
			return true;
		w->near = NULL;
	}
	return wire_find_fast(p, w);
}

/* Begin the flow of a SYN. Return: whether there is room for it, near. */
slow_fn bool wire_open(const struct pkt *p)
{
	__u32 now = now_seconds(), tables = tables_generation();
	struct pair *pair = pair_of(&p->t, 0);

	return pair && !observed(now) && !shadows_exist(now) && near_enter_pair(&p->t, pair, now, tables);
}

/* What is not as most packets are: of a flow that does not lie near, or is translated. Return: a tc verdict or FAST_NO. */
inline_fn int wire_go_far(struct __sk_buff *skb, struct pkt *p, const struct wire_way *w)
{
	struct endpoint *to = endpoint_slot(w->id);
	int reason = REASON_NONE;

	if (!to || unlikely(too_long(skb, to->mtu)))
		return FAST_NO;
	if (w->near) {
		reason = translate(skb, p, &w->near->e.other, true); /* a Service's answer */
	} else if (!w->fast) {
		if (!wire_open(p))
			return FAST_NO;
	} else if (!fast_seen(w->fast, p)) {
		return FAST_NO;
	} else if (w->fast->flags & FAST_TRANSLATE) {
		reason = translate(skb, p, &w->fast->to, false);
	}
	return reason ? drop(skb, reason, DIR_TO_POD) : wire_into_pod(skb, p, w->id, to->mac, to->ifindex, to->mtu);
}

/**
 * wire_go - into the pod
 * @w: as wire_find leaves it
 * @ref: the node that sent it by the tunnel, 0: it came without
 *
 * Return: a tc verdict or FAST_NO.
 */
inline_fn int wire_go(struct __sk_buff *skb, struct pkt *p, const struct wire_way *w, __u32 ref)
{
	struct near_flow *n = w->near;
	struct pod_way *in;

	skb->cb[CB_REMOTE] = ref;
	if (n && unlikely(!near_passes(n, p, w->reply)))
		return FAST_NO;
	if (unlikely(!n || n->e.role != CT_DIRECT))
		return wire_go_far(skb, p, w);
	if (unlikely(too_long(skb, n->mtu)))
		return FAST_NO;
	in = near_way_in(n);
	return wire_into_pod(skb, p, w->id, in->macs, in->ifindex, n->mtu);
}

/* Whether the node's packets come without tunnel. */
inline_fn bool wire_plain(__u32 ref)
{
	struct remote *from = remote_of(ref);

	return from && !(from->flags & REMOTE_TUNNEL);
}

/* A packet that came without tunnel. Return: a tc verdict or FAST_NO. */
slow_fn int wire_fast(struct __sk_buff *skb)
{
	struct wire_way w = {};
	struct pkt p = {};

	p.shape = glance(skb, &p);
	if (unlikely(!wire_find(&p, &w)))
		return FAST_NO;
	if (w.fast && w.fast->flags & FAST_VIA_STACK) /* which judges it at the pod's own hook */
		return NEXT;
	if (unlikely(w.near ? !w.near->plain : !wire_plain(w.ref)))
		return FAST_NO;
	return wire_go(skb, &p, &w, 0);
}
