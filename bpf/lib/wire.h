/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What to_pod does at the node's NIC (from_wire): whose packet it is, and
 * handing it to the pod. Packets between nodes' pods come this way, and answers
 * to what pods have opened to the outside past the host's stack; what somebody
 * outside opens passes the stack both ways, so that a user's own NAT keeps working.
 */
#pragma once

#include "common.h"
#include "deliver.h"
#include "drop.h"
#include "parse.h"
#include "remote.h"

/* Beside enum drop_reason: the packet is for the host's stack. */
#define WIRE_TO_STACK -1

/* Whether an end is neither a pod of this node nor of another one's networks, as far as was known when it was judged. */
inline_fn bool of_no_node(const struct ct_end *end)
{
	return !end->endpoint && (!end->generation || end->generation == REMOTE_OUTSIDE);
}

/**
 * wire_sender - whether a packet from the wire may be of that sender
 * @from: the end of its flow that it comes from, as judged
 * @ref: the node that sent it by the tunnel, 0: it came without
 *
 * Return: enum drop_reason, or WIRE_TO_STACK.
 */
inline_fn int wire_sender(const struct ct_end *from, __u32 ref)
{
	struct remote *r;

	if (from->endpoint)
		return REASON_WIRE_SPOOFED;
	if (ref)
		return from->generation == ref ? REASON_NONE : REASON_TUNNEL_SOURCE;
	r = remote_of(from->generation);
	return !r || r->flags & REMOTE_TUNNEL ? WIRE_TO_STACK : REASON_NONE;
}

/**
 * wire_to_stack - leave a packet from the wire to the host's stack
 *
 * One whose tunnel headers were stripped goes on as if the tunnel's device had received it.
 */
slow_fn int wire_to_stack(struct __sk_buff *skb, const struct pkt *p)
{
	struct node_config *n = node_config();
	__u32 ref = skb->cb[CB_REMOTE];

	if (!ref)
		return NEXT;
	if (!n || !p || !n->overlay || p->kind == PKT_CONTROL || remote_find(&p->t.src) != ref)
		return drop(skb, REASON_TUNNEL_SOURCE, DIR_TO_POD);
	if (skb->ifindex == n->overlay)
		return NEXT;
	skb->mark = n->key;
	redirect_note(skb, n->overlay, REDIRECT_INGRESS);
	return bpf_redirect(n->overlay, BPF_F_INGRESS);
}

/**
 * wire_sent - whether a packet from the wire came by the way by which its sender's node sends
 *
 * Asked before it changes anything that other packets rest on.
 *
 * Return: enum drop_reason, or WIRE_TO_STACK.
 */
slow_fn int wire_sent(struct __sk_buff *skb, const struct pkt *p)
{
	__u32 ref = skb->cb[CB_REMOTE], of = remote_find(&p->t.src);
	struct remote *r = remote_of(of);

	if (ref && of != ref)
		return endpoint_of(&p->t.src) ? REASON_WIRE_SPOOFED : REASON_TUNNEL_SOURCE;
	return !ref && r && r->flags & REMOTE_TUNNEL ? WIRE_TO_STACK : REASON_NONE;
}

/**
 * wire_verdict - what comes of a packet that wire_sender has judged
 * @judged: not REASON_NONE
 */
inline_fn int wire_verdict(struct __sk_buff *skb, const struct pkt *p, int judged)
{
	return judged == WIRE_TO_STACK ? wire_to_stack(skb, p) : drop(skb, judged, DIR_TO_POD);
}

/* Past the host's end of a pod, @ifindex. @macs: both link addresses into it; @mtu: what it takes */
inline_fn int wire_into_pod(struct __sk_buff *skb, const struct pkt *p, __u32 id, const __u8 *macs, __u32 ifindex,
			    __u16 mtu)
{
	if (unlikely(too_long(skb, mtu)))
		return wire_to_stack(skb, p);
	if (unlikely(!link_write(skb, macs)))
		return drop(skb, REASON_DELIVER, DIR_TO_POD);
	count_to_pod(id, skb->len);
	redirect_note(skb, ifindex, REDIRECT_PEER);
	return bpf_redirect_peer(ifindex, 0);
}

/**
 * into_pod - a packet may enter the pod whose hook this is
 * Return: a tc verdict; at the pod's own hook it just goes on.
 */
inline_fn int into_pod(struct __sk_buff *skb, const struct pkt *p, const struct endpoint *self, __u32 id)
{
	return from_wire ? wire_into_pod(skb, p, id, self->mac, self->ifindex, self->mtu) : NEXT;
}
