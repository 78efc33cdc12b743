// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * The egress of a link whose children are pods (macvlan, ipvlan). Programs
 * inside a pod can be passed by: a packet socket with PACKET_QDISC_BYPASS skips
 * the pod's egress hook, and a pod with CAP_NET_ADMIN can make itself a second
 * child of the same parent. What leaves the node is therefore checked here
 * again: it must come from a link address that is known, carry an address that
 * belongs to it, and be of a flow that the pod's own hook has let through.
 */
#include "lib/common.h"
#include "lib/conntrack.h"
#include "lib/drop.h"
#include "lib/frag.h"
#include "lib/icmp_error.h"
#include "lib/parse.h"
#include "lib/policy.h"
#include "lib/source.h"

/**
 * sender_of - the endpoint whose child of @parent sent the packet
 * @id: set to the endpoint; 0 for the host's own packets
 *
 * Return: enum drop_reason.
 */
inline_fn int sender_of(struct __sk_buff *skb, const struct pkt *p, const struct parent *parent, __u32 *id)
{
	struct child_key key = { .parent = skb->ifindex };
	__u32 *child;

	*id = 0;
	if (bpf_skb_load_bytes(skb, ETH_ALEN, key.mac, ETH_ALEN))
		return REASON_TRUNCATED;
	if (parent->shared_mac) {
		/* All children have the parent's address: only the network address tells. */
		*id = p->kind == PKT_CONTROL ? 0 : endpoint_of(&p->t.src);
		return REASON_NONE;
	}
	if (!__builtin_memcmp(key.mac, parent->mac, ETH_ALEN))
		return REASON_NONE;
	child = bpf_map_lookup_elem(&mst_children_v1, &key);
	if (!child)
		return REASON_UNKNOWN_CHILD;
	*id = *child;
	return REASON_NONE;
}

/* Whether the pod's egress hook has let the packet's flow through, and policy still does. */
inline_fn int seen_by_hook(struct __sk_buff *skb, struct pkt *p, __u32 id, __u32 now)
{
	struct flow f = { .now = now };
	struct quote q = {};
	int reason;

	if (p->kind == PKT_ICMP_ERROR) {
		reason = error_flow(skb, p, &f, &q);
		if (reason)
			return reason;
	} else {
		ct_find(&f, p, CT_SCOPE_FLOW);
	}
	if (!f.e)
		return REASON_HOOK_BYPASSED;
	return ends_current(f.e) ? REASON_NONE : judge_again(&f, id, !f.reply);
}

SEC("tc")
int parent_egress(struct __sk_buff *skb)
{
	__u32 id, ifindex = skb->ifindex, now = now_seconds();
	struct parent *parent = bpf_map_lookup_elem(&mst_parents_v1, &ifindex);
	struct endpoint *self;
	struct pkt p = {};
	int malformed, reason;

	if (!parent)
		return NEXT;
	malformed = parse(skb, &p);
	reason = sender_of(skb, &p, parent, &id);
	if (!reason && !id)
		return NEXT;
	if (!reason)
		reason = malformed;
	self = endpoint_slot(id);
	if (!reason && (!self || !self->generation))
		reason = REASON_NO_ENDPOINT;
	if (!reason && self)
		reason = source_check(skb, &p, self, id, !parent->shared_mac);
	if (!reason && p.frag)
		reason = frag_follow(&p, now);
	if (!reason && self && p.kind == PKT_CONTROL)
		reason = judge_group(skb, &p, self, id, true);
	else if (!reason)
		reason = seen_by_hook(skb, &p, id, now);
	if (!reason)
		return NEXT;
	skb->cb[CB_ENDPOINT] = id; /* for whoever reads of it */
	return drop(skb, reason, DIR_PARENT);
}

char __license[] SEC("license") = "Dual BSD/GPL";
