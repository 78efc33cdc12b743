/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Handing a packet to a pod of this node. */
#pragma once

#include "common.h"
#include "drop.h"
#include "parse.h"

#define MARK_ANSWER 0x6d737401 /* on an answer of ours that passes the pod's own ingress hook */

inline_fn int redirect_note(struct __sk_buff *skb, __u32 ifindex, __u32 kind)
{
	skb->cb[CB_REDIRECT_IFINDEX] = ifindex;
	skb->cb[CB_REDIRECT_KIND] = kind;
	return 0;
}

/* Longer than the pod takes, and not a bundle that is cut into what it takes. */
inline_fn bool too_long(struct __sk_buff *skb, const struct endpoint *to)
{
	return skb->len > to->mtu + ETH_HLEN && !skb->gso_size;
}

/**
 * reflect - hand a packet, rewritten as an answer, to the pod it came from
 */
inline_fn int reflect(struct __sk_buff *skb, struct endpoint *self)
{
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	if (in_pod) {
		skb->mark = MARK_ANSWER;
		redirect_note(skb, skb->ifindex, REDIRECT_INGRESS);
		return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
	}
	redirect_note(skb, self->ifindex, REDIRECT_PEER);
	return bpf_redirect_peer(self->ifindex, 0);
}

/**
 * deliver_inner - from inside a pod, to a sibling on the same parent or to itself
 */
inline_fn int deliver_inner(struct __sk_buff *skb, struct endpoint *self, struct endpoint *to)
{
	if (!(to->flags & EP_IN_POD) || to->parent != self->parent || too_long(skb, to))
		return NEXT;
	if (bpf_skb_store_bytes(skb, 0, to->mac, ETH_ALEN, 0))
		return drop(skb, REASON_DELIVER, DIR_FROM_POD);
	if (to != self)
		return NEXT;
	redirect_note(skb, skb->ifindex, REDIRECT_INGRESS);
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

/**
 * deliver - send a packet on to a pod of this node
 * @self: the endpoint it came from
 * @to: where it goes
 * @id: of @to
 *
 * Return: a tc verdict; NEXT leaves the way to the kernel's routing.
 */
inline_fn int deliver(struct __sk_buff *skb, struct endpoint *self, struct endpoint *to, __u32 id)
{
	__u8 macs[2 * ETH_ALEN];

	if (in_pod)
		return deliver_inner(skb, self, to);
	if (!(to->flags & EP_HOST_END) || too_long(skb, to))
		return NEXT;
	__builtin_memcpy(macs, to->mac, ETH_ALEN);
	__builtin_memcpy(macs + ETH_ALEN, to->node_mac, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return drop(skb, REASON_DELIVER, DIR_FROM_POD);
	/* Pods on one bridge address each other, not the host's end. */
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	count_to_pod(id, skb->len);
	redirect_note(skb, to->ifindex, REDIRECT_PEER);
	return bpf_redirect_peer(to->ifindex, 0);
}
