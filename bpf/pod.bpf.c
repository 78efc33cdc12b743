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
#include "lib/common.h"
#include "lib/conntrack.h"
#include "lib/deliver.h"
#include "lib/drop.h"
#include "lib/edge.h"
#include "lib/events.h"
#include "lib/fast.h"
#include "lib/fib.h"
#include "lib/frag.h"
#include "lib/icmp_error.h"
#include "lib/lb.h"
#include "lib/masquerade.h"
#include "lib/nat.h"
#include "lib/near_path.h"
#include "lib/nobody.h"
#include "lib/parse.h"
#include "lib/plan.h"
#include "lib/policy.h"
#include "lib/refuse.h"
#include "lib/remote.h"
#include "lib/source.h"
#include "lib/wire.h"

/**
 * flow_current - whether what was judged of both ends still holds
 * @mine: the end that this program's endpoint is
 * @id: of that endpoint; the flow may have been judged while it was not there
 */
inline_fn bool flow_current(const struct ct_entry *e, const struct ct_end *mine, __u32 id)
{
	return mine->endpoint == id && ends_current(e);
}

/* The endpoint the packet goes to: NULL when that is not on this node, or the kernel must carry it. */
inline_fn struct endpoint *next_endpoint(const struct ct_entry *e, bool reply, __u32 *id)
{
	const struct ct_end *end = reply ? &e->opener : &e->responder;

	*id = end->endpoint;
	if (!*id || (reply && e->flags & CT_VIA_STACK))
		return NULL;
	return endpoint_slot(*id);
}

/* The node that the packet goes to: 0 when the kernel must carry it. */
inline_fn __u32 next_remote(const struct ct_entry *e, bool reply)
{
	const struct ct_end *end = reply ? &e->opener : &e->responder;

	return end->endpoint || e->flags & CT_VIA_STACK ? 0 : end->generation;
}

/* What the client sees in the shadow is another flow's tuple, too: its own hook, where that comes behind
 * this one, could not tell whose answer it is, were it turned back here. */
inline_fn bool left_to_client(const struct ct_entry *e, const struct endpoint *self, const struct endpoint *to)
{
	return hook_follows && e->role == CT_POST_NAT && e->shadow && to != self;
}

/* Where the reply's tuple is turned back depends on which hook sees it last before the client, or before
 * the node's stack, which would masquerade an answer to a client outside as a flow of the pod's own. */
inline_fn bool reply_translated_here(const struct ct_entry *e, struct endpoint *self, struct endpoint *to)
{
	if (in_pod && e->flags & CT_EDGE)
		return self->flags & EP_NODE_ROUTES;
	if (!to)
		return false;
	if (left_to_client(e, self, to))
		return false;
	return in_pod ? to == self || siblings(self, to) : !!(to->flags & EP_HOST_END);
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

/* A packet of a pod's that is masqueraded goes out as by a router. */
slow_fn int forward_masqueraded(struct __sk_buff *skb, struct pkt *p, const struct endpoint *self, const struct ct_entry *e,
				const struct ct_key *at)
{
	int reason;

	p->masqueraded = 1;
	keep_known(skb, p, e, at, false, &e->other, FAST_MASQUERADE);
	if (!hop_take(skb, p))
		return leave(skb, self);
	reason = translate(skb, p, &e->other);
	return reason ? drop(skb, reason, DIR_FROM_POD) : EDGE_SEND;
}

/**
 * forward_known - a packet from a pod that belongs to a known flow
 * @e: its entry
 * @at: where that lies
 *
 * A function of the verifier's own: it is read once, not for each table where the entry may lie.
 */
global_fn int forward_known(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, struct ct_entry *e,
			    const struct ct_key *at)
{
	bool translated = false, reply;
	struct endpoint *to;
	struct tuple t;
	int reason = 0, verdict;
	__u32 id, remote;

	if (!p || !self || !e || !at)
		return drop(skb, REASON_CT_FULL, DIR_FROM_POD);
	reply = key_src_is_hi(at, &p->t) ^ (e->flags & CT_ORIGIN_IS_HI);
	if (!flow_current(e, reply ? &e->responder : &e->opener, skb->cb[CB_ENDPOINT]))
		reason = judge_again(e, at, skb->cb[CB_ENDPOINT], !reply);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	if (!in_pod && !reply && e->flags & CT_MASQUERADE)
		return forward_masqueraded(skb, p, self, e, at);
	to = next_endpoint(e, reply, &id);
	if (e->role == CT_PRE_NAT && !reply) {
		t = e->other;
		translated = true;
	} else if (e->role == CT_POST_NAT && reply && (to_edge(e) || reply_translated_here(e, self, to))) {
		tuple_reverse(&t, &e->other);
		translated = true;
	}
	remote = to || (reply && to_edge(e)) ? 0 : next_remote(e, reply);
	if (reply && to && left_to_client(e, self, to)) {
		verdict = deliver(skb, p, self, to, id, NULL);
		unvouch(skb);
		return verdict;
	}
	if (e->near && remote && e->role == CT_DIRECT) {
		skb->cb[CB_WAY] = near_keep(&p->t, p->tables);
		return send_out(skb, p, self, remote);
	}
	if (e->near && (to || remote))
		near_known(p, self, to);
	else if (!(reply && to_edge(e)))
		keep_known(skb, p, e, at, reply, translated ? &t : NULL, to ? FAST_DELIVER : 0);
	else if (edge_way(e) == EDGE_SEND)
		keep_known(skb, p, e, at, reply, &t, FAST_BY_EDGE);
	if (translated)
		reason = translate(skb, p, &t);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	if (reply && to_edge(e))
		return edge_way(e);
	return to ? deliver(skb, p, self, to, id, NULL) : send_out(skb, p, self, remote);
}

/* Whether Services of this packet's kind are this hook's to translate: of SCTP no socket's program knows. */
inline_fn bool serves(const struct endpoint *self, const struct pkt *p)
{
	return self->flags & EP_SERVICE_TC || (p->proto == IPPROTO_SCTP && self->flags & EP_SERVICE_SOCKET);
}

/* Whether a Service has come since the flow began, as one to an address like any other: while nobody
 * has answered there, its opener is led to the Service with the next try. */
slow_fn bool served_since(const struct flow *f, const struct pkt *p, const struct endpoint *self)
{
	struct service_key key = { .addr = p->t.dst, .port = p->t.dport, .proto = p->proto };

	if (!f->e || f->e->role != CT_DIRECT || f->reply || !serves(self, p))
		return false;
	if (p->proto != IPPROTO_UDP && (p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return false;
	return service_at(&key, SCOPE_ANY);
}

/**
 * forward_new - the first packet of a flow from a pod
 * @scope: CT_SCOPE_SHADOW when a translated flow occupies the packet's own tuple
 */
slow_fn int forward_new(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, __u8 scope, __u32 now)
{
	struct plan plan = { .post = p->t, .role = CT_DIRECT, .scope = scope,
			     .opener = { .endpoint = skb->cb[CB_ENDPOINT], .generation = self->generation } };
	__u32 asked = nobody_generation();
	struct endpoint *to;
	int reason = 0;

	if (scope == CT_SCOPE_SHADOW) {
		struct facts *known = facts();

		if (known)
			known->shadowed = 1;
		if (p->proto != IPPROTO_TCP && p->proto != IPPROTO_UDP && p->proto != IPPROTO_SCTP)
			return drop(skb, REASON_NAT_FAILED, DIR_FROM_POD);
		plan.role = CT_PRE_NAT;
	} else if (serves(self, p)) {
		reason = plan_service(p, &plan);
	}
	if (reason == REASON_NO_BACKEND || reason == REASON_SERVICE_PORT || reason == REASON_MIDSTREAM_NAT)
		return refuse(skb, p, self, reason, now);
	if (!reason)
		reason = admit(p, &plan, 0);
	to = plan.responder.endpoint ? endpoint_slot(plan.responder.endpoint) : NULL;
	if (!reason && !in_pod && !to && !plan.responder.generation && scope == CT_SCOPE_FLOW && masquerade_routes(skb, p, self))
		reason = masquerade(skb, p, &plan);
	p->masqueraded = !in_pod && !!(plan.flags & CT_MASQUERADE);
	plan.near = p->shape && p->proto == IPPROTO_TCP && scope == CT_SCOPE_FLOW &&
		    (to ? alike(self, to) : !!plan.responder.generation);
	if (reason == REASON_MIDSTREAM_NAT)
		return refuse(skb, p, self, reason, now);
	if (!reason && p->masqueraded)
		reason = masquerade_port(skb, p, &plan, now);
	else if (!reason && plan.role == CT_PRE_NAT)
		reason = nat_port(&plan, p->proto, now);
	if (!reason && plan.near)
		pair_keep(&plan, p, asked);
	plan.near |= p->masqueraded && p->shape && p->proto == IPPROTO_TCP;
	if (!reason)
		reason = create_flow(p, &plan, now);
	fast_forget_plan(p, &plan);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	event_opened(skb, p, &plan, DIR_FROM_POD, now);
	if (plan.near && !p->masqueraded)
		near_new(skb, p, &plan);
	else
		keep_new(skb, p, &plan, to ? FAST_DELIVER : p->masqueraded ? FAST_MASQUERADE : 0);
	if (p->masqueraded && !hop_take(skb, p))
		return leave(skb, self);
	if (plan.role == CT_PRE_NAT)
		reason = translate(skb, p, &plan.post);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	if (p->masqueraded)
		return EDGE_SEND;
	return to ? deliver(skb, p, self, to, plan.responder.endpoint, NULL) : send_out(skb, p, self, plan.responder.generation);
}

/**
 * forward_error - an ICMP error from a pod follows the flow that it is about
 */
slow_fn int forward_error(struct __sk_buff *skb, struct pkt *p, struct endpoint *self, __u32 now)
{
	struct flow f = { .now = now };
	struct quote q = {};
	struct endpoint *to;
	struct tuple t;
	__u32 id;
	int reason = error_flow(skb, p, &f, &q);

	if (!reason && f.e && !ends_current(f.e))
		reason = REASON_ICMP_ERROR_FLOW; /* what it is about was judged on its way, but not as things are now */
	if (reason || !f.e)
		return drop(skb, reason, DIR_FROM_POD);
	to = next_endpoint(f.e, f.reply, &id);
	if (f.e->role == CT_PRE_NAT && !f.reply) {
		tuple_reverse(&t, &f.e->other);
		reason = translate_error(skb, p, &q, &t);
	} else if (f.e->role == CT_POST_NAT && f.reply && (to_edge(f.e) || reply_translated_here(f.e, self, to))) {
		t = f.e->other;
		q.keep_outer = to_edge(f.e) && edge_way(f.e) == EDGE_HOME;
		reason = translate_error(skb, p, &q, &t);
	}
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	if (f.reply && to_edge(f.e)) {
		p->t.dst = t.src;
		return q.keep_outer ? NEXT : EDGE_SEND;
	}
	if (!in_pod && f.e->flags & CT_MASQUERADE) {
		p->t.src = t.dst;
		p->t.dst = t.src;
		return EDGE_SEND;
	}
	if (!to || !to->generation)
		return NEXT;
	reason = deliver(skb, p, self, to, id, NULL);
	if (f.reply && left_to_client(f.e, self, to))
		unvouch(skb);
	return reason;
}

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

	if (!reason && f.e && !ends_current(f.e))
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

SEC("tc")
int from_pod(struct __sk_buff *skb)
{
	struct flow f;
	struct endpoint *self;
	__u8 scope = CT_SCOPE_FLOW;
	struct pkt p = {};
	int reason, verdict;

	p.shape = glance(skb, &p);
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
		return edge_sent(skb, &p, verdict);
	f = (struct flow){ .now = now_seconds() };
	reason = p.shape ? REASON_NONE : parse(skb, &p);
	if (!reason)
		reason = source_check(skb, &p, self, skb->cb[CB_ENDPOINT], true);
	if (!reason && p.frag)
		reason = frag_follow(&p, f.now, false);
	if (reason)
		return drop(skb, reason, DIR_FROM_POD);
	count_from_pod(skb->cb[CB_ENDPOINT], skb->len);
	if (p.kind == PKT_CONTROL) {
		reason = judge_group(skb, &p, self, skb->cb[CB_ENDPOINT], true);
		return reason ? drop(skb, reason, DIR_FROM_POD) : NEXT;
	}
	if (p.kind == PKT_ICMP_ERROR)
		return edge_sent(skb, &p, forward_error(skb, &p, self, f.now));

	ct_find_whole(&f, &p, scope);
	if (f.e && (begins_anew(&f, &p) || (!f.e->seen_reply && served_since(&f, &p, self)) ||
		    (!in_pod && masquerade_worn_out(f.e))))
		ct_forget(&f);
	if (f.e ? f.e->role == CT_POST_NAT && !f.reply : shadows_exist()) {
		/* Only a translated flow may look like this, and not here: the pod has a
		 * flow of its own on the tuple that another one was translated to. It stays
		 * in the shadow when that one is gone. */
		if (f.e)
			scope = CT_SCOPE_SHADOW;
		ct_find(&f, &p, CT_SCOPE_SHADOW);
		if (f.e && begins_anew(&f, &p))
			ct_forget(&f);
	}
	if (!f.e) {
		verdict = forward_new(skb, &p, self, scope, f.now);
		return to_send_out(verdict) ? sent_out(skb, &p, self) : edge_sent(skb, &p, verdict);
	}
	ct_touch(&f, &p);
	verdict = f.e ? forward_known(skb, &p, self, f.e, &f.key) : drop(skb, REASON_CT_FULL, DIR_FROM_POD);
	return to_send_out(verdict) ? sent_out(skb, &p, self) : edge_sent(skb, &p, verdict);
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
	if (in_pod)
		reason = sibling_check(skb, self, plan.opener.endpoint);
	if (from_wire)
		reason = wire_sender(&plan.opener, skb->cb[CB_REMOTE]);
	if (from_wire && reason)
		return wire_verdict(skb, p, reason);
	if (!reason)
		reason = admit(p, &plan, skb->cb[CB_ENDPOINT]);
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
inline_fn int wire_known(struct __sk_buff *skb, struct pkt *p, struct flow *f, __u32 id)
{
	int reason;

	if (f->e->flags & CT_VIA_STACK)
		return WIRE_TO_STACK;
	if (!flow_current(f->e, f->reply ? &f->e->opener : &f->e->responder, id)) {
		reason = judge_again(f->e, &f->key, id, f->reply);
		if (reason)
			return reason;
	}
	return wire_sender(f->reply ? &f->e->responder : &f->e->opener, skb->cb[CB_REMOTE]);
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
	if (!reason && in_pod)
		reason = sibling_check(skb, self, f->reply ? e->responder.endpoint : e->opener.endpoint);
	if (reason)
		return drop(skb, reason, DIR_TO_POD);
	if (e->role == CT_POST_NAT && f->reply && e->opener.endpoint == id) {
		tuple_reverse(&t, &e->other);
		translated = true;
	}
	if (from_wire && e->near)
		near_keep(&p->t, p->tables);
	else
		keep_known(skb, p, e, &f->key, f->reply, translated ? &t : NULL, FAST_TO_POD);
	if (translated) {
		reason = translate(skb, p, &t);
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
	if (in_pod)
		reason = sibling_check(skb, self, from.endpoint);
	return reason ? drop(skb, reason, DIR_TO_POD) : into_pod(skb, p, self, id);
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
	if (!reason && p.frag)
		reason = frag_follow(&p, f.now, !in_pod);
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
	if (f.e && begins_anew(&f, &p))
		ct_forget(&f);
	if (!f.e)
		return accept_new(skb, &p, self, f.now);
	if (from_wire) {
		reason = wire_known(skb, &p, &f, skb->cb[CB_ENDPOINT]);
		if (reason)
			return wire_known_verdict(skb, &p, &f, reason);
	}
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
