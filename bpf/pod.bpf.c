// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * A pod's interface, both directions. On the host's end `from_pod` sits at the
 * interface's ingress and `to_pod` at its egress; inside the pod the other way
 * round (in_pod). Reached from an entry program, which leaves the endpoint's id
 * in cb[CB_ENDPOINT].
 *
 * The sender's program does the receiver's part too when it delivers on the
 * same node, because redirect_peer passes the receiver's host end by. netkit's
 * programs cannot do that: they send the packet out of the receiver's host end
 * (deliver_egress), and its own hook sees it. There, and inside pods, the sender's
 * program vouches for what it has judged for both (lib/voucher.h). At the node's NIC `to_pod`
 * is called for what other nodes' pods (from_wire) and clients outside (from_edge) send.
 */
#include "lib/accept.h"
#include "lib/common.h"
#include "lib/conntrack.h"
#include "lib/deliver.h"
#include "lib/drop.h"
#include "lib/edge.h"
#include "lib/ends.h"
#include "lib/fast.h"
#include "lib/fib.h"
#include "lib/forward.h"
#include "lib/frag.h"
#include "lib/near_path.h"
#include "lib/parse.h"
#include "lib/policy.h"
#include "lib/source.h"
#include "lib/wire.h"

/* netkit leaves a packet the type that its sender told the kernel, which is what the kernel goes by behind the hook. */
inline_fn bool disguised(struct __sk_buff *skb, const struct pkt *p)
{
	__be16 *type;

	if (!deliver_egress)
		return false;
	if (likely(p->shape))
		return skb->protocol != (p->ipv6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP));
	type = (__be16 *)packet(skb) + ETH_ALEN;
	return (void *)(type + 1) <= packet_end(skb) && *type != skb->protocol;
}

/* Whether the pod's link has translated a packet before its filter. Never while there is one of them alone: the pod's own
 * packet on that tuple would be taken for it. */
inline_fn bool translated_before(const struct __sk_buff *skb, const struct endpoint *self, const struct ct_entry *e)
{
	__u32 id = skb->cb[CB_ENDPOINT];

	return !in_pod && self->flags & EP_SETTLING && e->opener.endpoint == id && flow_current(e, &e->opener, id);
}

SEC("tc")
int from_pod(struct __sk_buff *skb)
{
	struct flow f;
	struct endpoint *self;
	__u8 scope = CT_SCOPE_FLOW;
	struct pkt p = {};
	int reason, verdict;

	p.shape = glance(skb, &p);
	if (unlikely(disguised(skb, &p)))
		return drop(skb, REASON_ETHERTYPE, DIR_FROM_POD);
	verdict = near_way(skb, &p);
	if (likely(is_verdict(verdict)))
		return verdict;
	self = endpoint_slot(skb->cb[CB_ENDPOINT]);
	if (unlikely(!self || !self->generation))
		return drop(skb, REASON_NO_ENDPOINT, DIR_FROM_POD);
	if (verdict == FAST_NO)
		verdict = near_begins(skb, &p, self);
	if (likely(is_verdict(verdict)))
		return verdict;
	if (verdict == FAST_NO)
		verdict = fast_path(skb, &p, self, DIR_FROM_POD);
	if (to_send_out(verdict))
		return sent_out(skb, &p, self);
	if (verdict != FAST_NO)
		return edge_sent(skb, &p, self, verdict);
	f = (struct flow){ .now = now_seconds() };
	reason = p.shape ? REASON_NONE : parse(skb, &p);
	if (!reason)
		reason = source_check(skb, &p, self, skb->cb[CB_ENDPOINT], true);
	if (!reason && p.frag)
		reason = frag_follow(&p, f.now, false);
	if (!reason && !in_pod && link_local(&p.t.src) && leaves_link(skb, &p, self))
		reason = REASON_SPOOFED_ADDRESS;
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	count_from_pod(skb->cb[CB_ENDPOINT], skb->len);
	if (p.kind == PKT_CONTROL && to_be_routed(skb, &p, self))
		p.kind = PKT_FLOW; /* a neighbour has nothing to tell beyond its link */
	if (p.kind == PKT_CONTROL) {
		reason = judge_group(skb, &p, self, skb->cb[CB_ENDPOINT], true);
		return reason ? drop(skb, reason, DIR_FROM_POD) : NEXT;
	}
	if (p.kind == PKT_ICMP_ERROR)
		return edge_sent(skb, &p, self, forward_error(skb, &p, self, f.now));

	ct_find_whole(&f, &p, scope);
	if (!f.e && in_midst(&p))
		ct_recall(&f);
	if (f.e && (begins_anew(&f, &p) || (!f.e->seen_reply && served_since(&f, &p, self)) ||
		    (!in_pod && masquerade_worn_out(f.e, p.proto)))) {
		reason = begin_anew(&f, skb->cb[CB_ENDPOINT], true);
		if (reason)
			return drop(skb, reason, DIR_FROM_POD);
	}
	if (f.e ? f.e->role == CT_POST_NAT && !f.reply : shadows_exist(f.now)) {
		/* Only a translated flow may look like this, and not here: the pod has a
		 * flow of its own on the tuple that another one was translated to. It stays
		 * in the shadow when that one is gone. */
		if (f.e && translated_before(skb, self, f.e))
			return NEXT;
		if (f.e)
			scope = CT_SCOPE_SHADOW;
		ct_find(&f, &p, CT_SCOPE_SHADOW);
		if (f.e && begins_anew(&f, &p))
			begin_anew(&f, skb->cb[CB_ENDPOINT], true); /* a client's half: as with another backend */
	}
	if (!f.e) {
		verdict = forward_new(skb, &p, self, scope, f.now);
		return to_send_out(verdict) ? sent_out(skb, &p, self) : edge_sent(skb, &p, self, verdict);
	}
	reason = ends(&p) ? denied_end(f.e, &f.key, &p, skb->cb[CB_ENDPOINT], true) : REASON_NONE;
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	ct_touch(&f, &p);
	verdict = f.e ? forward_known(skb, &p, self, f.e, &f.key) : drop(skb, REASON_CT_FULL, DIR_FROM_POD);
	return to_send_out(verdict) ? sent_out(skb, &p, self) : edge_sent(skb, &p, self, verdict);
}

/* Whether a packet is somebody else's: a bridge that does not know yet where that is sends it to all, and if it is a pod, its
 * own hook judges it. Not what is for all. */
inline_fn bool of_another(const struct __sk_buff *skb, const struct pkt *p, const struct endpoint *self)
{
	static const __u8 none[ETH_ALEN] = {}; /* netkit's, which has no link header */
	__u32 id;

	if (in_pod || from_wire || from_edge || p->kind == PKT_CONTROL)
		return false;
	if (likely(addr_equal(&p->t.dst, &self->ip4) || addr_equal(&p->t.dst, &self->ip6)))
		return false;
	if (!mac_equal(self->mac, none) && !addressed_to(skb, self->mac))
		return !to_group(skb);
	id = endpoint_of(&p->t.dst);
	return id && id != skb->cb[CB_ENDPOINT];
}

/* Return: a tc verdict: NEXT for what may enter the pod. */
inline_fn int judge_entering(struct __sk_buff *skb)
{
	struct flow f;
	struct endpoint *self = endpoint_slot(skb->cb[CB_ENDPOINT]);
	struct pkt p = {};
	int reason, verdict;

	if (!self || !self->generation)
		return drop(skb, REASON_NO_ENDPOINT, DIR_TO_POD);
	if (is_answer(skb))
		return NEXT;
	p.shape = glance(skb, &p);
	verdict = fast_path(skb, &p, self, DIR_TO_POD);
	if (verdict != FAST_NO)
		return verdict;
	f = (struct flow){ .now = now_seconds() };
	reason = p.shape ? REASON_NONE : parse(skb, &p);
	if (from_wire && !reason && (p.frag || (p.tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN)) {
		reason = wire_sent(skb, &p);
		if (reason)
			return wire_verdict(skb, &p, reason);
	}
	if (!reason && of_another(skb, &p, self))
		return TC_ACT_SHOT; /* nothing is lost: it is a copy */
	if (!reason && !in_pod && !from_wire && !from_edge && skb->ingress_ifindex &&
	    beside_tunnel(skb, &p.t.src)) /* before a flow learns of it */
		reason = REASON_TUNNEL_SOURCE;
	if (!reason && p.frag)
		reason = frag_follow(&p, f.now, !in_pod);
	if (in_pod && (!reason || reason == REASON_FRAG_NO_FIRST) &&
	    sibling_check(skb, self, endpoint_of(&p.t.src))) /* before its flow learns of it */
		reason = REASON_SPOOFED_MAC;
	if (reason && reason != REASON_FRAG_NO_FIRST)
		return drop(skb, reason, DIR_TO_POD);
	if (from_wire && (p.kind == PKT_CONTROL || (p.kind == PKT_ICMP_ERROR && skb->cb[CB_REMOTE])))
		return wire_to_stack(skb, &p);
	if (reason)
		return accept_orphan(skb, &p, self, f.now);
	if (!from_wire)
		count_to_pod(skb->cb[CB_ENDPOINT], skb->len);
	if (p.kind == PKT_CONTROL) {
		reason = judge_group(skb, &p, self, skb->cb[CB_ENDPOINT], false);
		return reason ? drop(skb, reason, DIR_TO_POD) : NEXT;
	}
	if (p.kind == PKT_ICMP_ERROR) {
		reason = accept_error(skb, &p, skb->cb[CB_ENDPOINT], f.now);
		if (from_wire && reason == WIRE_TO_STACK)
			return NEXT;
		return reason ? drop(skb, reason, DIR_TO_POD) : into_pod(skb, &p, self, skb->cb[CB_ENDPOINT]);
	}

	ct_find_whole(&f, &p, CT_SCOPE_FLOW);
	if (!f.e && in_midst(&p))
		ct_recall(&f);
	if (f.e && begins_anew(&f, &p)) {
		reason = begin_anew(&f, skb->cb[CB_ENDPOINT], false);
		if (reason)
			return drop(skb, reason, DIR_TO_POD);
	}
	if (!f.e)
		return accept_new(skb, &p, self, f.now);
	if (from_wire) {
		reason = wire_known(skb, &p, &f, skb->cb[CB_ENDPOINT]);
		if (reason)
			return wire_known_verdict(skb, &p, &f, reason);
	}
	reason = ends(&p) ? denied_end(f.e, &f.key, &p, skb->cb[CB_ENDPOINT], false) : REASON_NONE;
	if (reason)
		return drop(skb, reason, DIR_TO_POD);
	ct_touch(&f, &p);
	return accept_known(skb, &p, &f, self);
}

SEC("tc")
int to_pod(struct __sk_buff *skb)
{
	int verdict = judge_entering(skb);

	/* The edge has written the link addresses, and said whose host end it is. */
	return verdict == NEXT && from_edge ? bpf_redirect_peer(skb->cb[CB_REDIRECT_IFINDEX], 0) : verdict;
}

char __license[] SEC("license") = "Dual BSD/GPL";
