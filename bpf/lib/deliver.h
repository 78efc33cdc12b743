/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Handing a packet to a pod of this node. */
#pragma once

#include "common.h"
#include "drop.h"
#include "parse.h"
#include "voucher.h"

inline_fn int redirect_note(struct __sk_buff *skb, __u32 ifindex, __u32 kind)
{
	skb->cb[CB_REDIRECT_IFINDEX] = ifindex;
	skb->cb[CB_REDIRECT_KIND] = kind;
	return 0;
}

/* Longer than a pod takes, and not a bundle that is cut into what it takes. @mtu: as struct endpoint has it */
inline_fn bool too_long(struct __sk_buff *skb, __u16 mtu)
{
	return skb->len > mtu + ETH_HLEN && !skb->gso_size;
}

/**
 * reflect - hand a packet, rewritten as an answer, to the pod it came from
 */
inline_fn int reflect(struct __sk_buff *skb, struct endpoint *self)
{
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	if (in_pod) {
		skb->mark = answer_key;
		redirect_note(skb, skb->ifindex, REDIRECT_INGRESS);
		return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
	}
	if (deliver_egress) {
		skb->cb[CB_ANSWER] = answer_key; /* netkit wipes the mark before its program runs */
		redirect_note(skb, self->ifindex, REDIRECT_EGRESS);
		return bpf_redirect(self->ifindex, 0);
	}
	redirect_note(skb, self->ifindex, REDIRECT_PEER);
	return bpf_redirect_peer(self->ifindex, 0);
}

/* Return: whether @skb is an answer of ours on its way back to the pod. */
inline_fn bool is_answer(struct __sk_buff *skb)
{
	if (in_pod && skb->mark == answer_key) {
		skb->mark = 0;
		return true;
	}
	return deliver_egress && skb->cb[CB_ANSWER] == answer_key;
}

/**
 * leave - leave a packet from a pod to the kernel
 * @self: the endpoint it came from
 *
 * With a local MTU, a pod on a bridge may send what only mustang's pods take. Addressed to any
 * other neighbour it would be lost without a word: the node must route it instead, and answers
 * (or cuts, where it may).
 *
 * Return: a tc verdict.
 */
inline_fn int leave(struct __sk_buff *skb, const struct endpoint *self)
{
	if (in_pod || skb->gso_size || !self->link_mtu || skb->len <= self->link_mtu + ETH_HLEN ||
	    skb->pkt_type != PACKET_OTHERHOST)
		return NEXT;
	if (bpf_skb_store_bytes(skb, 0, self->node_mac, ETH_ALEN, 0))
		return drop(skb, REASON_DELIVER, DIR_FROM_POD);
	return NEXT;
}

/* Siblings on one segment find each other's link address themselves. */
inline_fn bool addressed_to(const struct __sk_buff *skb, const __u8 *mac)
{
	const struct ethhdr *eth = packet(skb);

	return (void *)(eth + 1) <= packet_end(skb) && mac_equal(eth->h_dest, mac);
}

/* Whether its link address is that of many. */
inline_fn bool to_group(const struct __sk_buff *skb)
{
	const struct ethhdr *eth = packet(skb);

	return (void *)(eth + 1) <= packet_end(skb) && eth->h_dest[0] & 1;
}

/* Address a packet to that link address. Return: false when that failed. */
inline_fn bool address_to(struct __sk_buff *skb, const __u8 *mac)
{
	return addressed_to(skb, mac) || !bpf_skb_store_bytes(skb, 0, mac, ETH_ALEN, 0);
}

/* Whether both are inside pods, on one parent, which takes packets from one to the other. */
inline_fn bool siblings(const struct endpoint *self, const struct endpoint *to)
{
	return to->flags & EP_IN_POD && to->parent && to->parent == self->parent;
}

/**
 * deliver_inner - from inside a pod, to a sibling on the same parent or to itself
 *
 * A macvlan finds its sibling by the MAC address, an ipvlan by the IP address, but only behind
 * its own MAC address, which is every sibling's. Pods with a NIC each have no parent.
 */
inline_fn int deliver_inner(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, struct endpoint *to, __u32 id,
			    __u64 *vouched)
{
	if ((!siblings(self, to) && to != self) || too_long(skb, to->mtu))
		return NEXT;
	if (!address_to(skb, to->mac))
		return drop(skb, REASON_DELIVER, DIR_FROM_POD);
	if (to != self) {
		if (vouched)
			vouch_again(skb, vouched, id, p->tcp_flags);
		else
			vouch(skb, id, NULL);
		return NEXT;
	}
	redirect_note(skb, skb->ifindex, REDIRECT_INGRESS);
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

/**
 * deliver_to - past the host's end of a pod
 * @id: of the endpoint
 * @macs: both link addresses into it
 * @ifindex: of the host end
 */
inline_fn int deliver_to(struct __sk_buff *skb, __u32 id, const __u8 *macs, __u32 ifindex)
{
	if (unlikely(!link_write(skb, macs)))
		return drop(skb, REASON_DELIVER, DIR_FROM_POD);
	/* Pods on one bridge address each other, not the host's end. */
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	if (deliver_egress) {
		vouch(skb, id, NULL);
		redirect_note(skb, ifindex, REDIRECT_EGRESS);
		return bpf_redirect(ifindex, 0);
	}
	count_to_pod(id, skb->len);
	redirect_note(skb, ifindex, REDIRECT_PEER);
	return bpf_redirect_peer(ifindex, 0);
}

/**
 * deliver - send a packet on to a pod of this node
 * @self: the endpoint it came from
 * @to: where it goes
 * @id: of @to
 * @vouched: inside a pod, when it goes the way of its flow's packets: what their vouchers have in common; or NULL
 *
 * Return: a tc verdict; NEXT leaves the way to the kernel's routing.
 */
inline_fn int deliver(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, struct endpoint *to, __u32 id,
		      __u64 *vouched)
{
	if (in_pod)
		return deliver_inner(skb, p, self, to, id, vouched);
	if (!(to->flags & EP_HOST_END) || too_long(skb, to->mtu))
		return leave(skb, self);
	return deliver_to(skb, id, to->mac, to->ifindex);
}
