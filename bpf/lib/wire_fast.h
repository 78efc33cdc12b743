/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * The short way (fast.h) from the NIC into a pod: whose packet it is lies in what
 * is kept of its flow, so that neither its receiver nor its sender is looked for.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "fast.h"
#include "remote.h"
#include "wire.h"

/* Where a packet from the wire goes, as what is kept of its flow says. */
struct wire_way {
	struct fast_flow *fast;
	struct endpoint *to;
	struct remote *from; /* the node that its sender is on */
};

/**
 * wire_find - what is kept of a packet's flow at the NIC, and holds
 * @p: as glance leaves it, of the packet inside the tunnel if there is one
 *
 * Return: whether anything is. Whether that node may send it so, is left to the caller.
 */
inline_fn bool wire_find(struct pkt *p, struct wire_way *w)
{
	__u32 hash, slot;

	if (!fast_shape(p))
		return false;
	hash = slot = tuple_hash(&p->t);
	w->fast = fast_at(p, FAST_WIRE_HOOK, &slot);
	if (!w->fast)
		return false;
	w->to = endpoint_slot(w->fast->peer);
	w->from = remote_of(w->fast->peer_generation);
	if (!w->to || !w->from)
		return false;
	p->generation = fast_generation(hash, w->to);
	return fast_holds(w->fast, p);
}

/**
 * wire_go - into the pod
 * @w: as wire_find leaves it
 * @ref: the node that sent it by the tunnel, 0: it came without
 *
 * Return: a tc verdict or FAST_NO.
 */
inline_fn int wire_go(struct __sk_buff *skb, struct pkt *p, struct wire_way *w, __u32 ref)
{
	int reason;

	if (!fast_seen(w->fast, p))
		return FAST_NO;
	skb->cb[CB_REMOTE] = ref;
	reason = w->fast->flags & FAST_TRANSLATE ? translate(skb, p, &w->fast->to) : REASON_NONE;
	return reason ? drop(skb, reason, DIR_TO_POD) : wire_into_pod(skb, p, w->to, w->fast->peer);
}

/* A packet that came without tunnel. Return: a tc verdict or FAST_NO. */
slow_fn int wire_fast(struct __sk_buff *skb)
{
	struct pkt p = {};
	struct wire_way w;

	p.shape = glance(skb, &p);
	if (!wire_find(&p, &w) || w.from->flags & REMOTE_TUNNEL)
		return FAST_NO;
	return wire_go(skb, &p, &w, 0);
}
