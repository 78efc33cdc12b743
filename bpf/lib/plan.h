/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A new flow at a pod's hook: what a Service makes of it, whether policy lets
 * it be, under which port the backend sees it, its entries, and telling of it.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "ends.h"
#include "events.h"
#include "fast.h"
#include "lb.h"
#include "parse.h"
#include "policy.h"
#include "sock_slot.h"

/* What a new flow is to become. */
struct plan {
	struct tuple post; /* the tuple the backend sees */
	__u32 backend;     /* id */
	struct ct_end opener;
	struct ct_end responder;
	__u8 role;         /* CT_DIRECT or CT_PRE_NAT */
	__u8 scope;        /* enum ct_scope of the packet's own tuple */
	__u8 flags;        /* enum ct_flag */
	bool found;        /* the responder is known */
	bool in_place;     /* its entry lies in the big table */
	bool near;         /* its entries may lie near */
};

/**
 * plan_service - decide what a Service does with a new flow
 * Return: enum drop_reason.
 */
global_fn int plan_service(struct pkt *p, struct plan *plan)
{
	struct service_key key;
	struct service *s;
	struct backend *b;
	__u16 address = 0;
	__u32 id = 0;
	int reason;

	if (!p || !plan)
		return REASON_NONE;
	key = (struct service_key){ .addr = p->t.dst, .port = p->t.dport, .proto = p->proto };
	s = service_at(&key, SCOPE_ANY);
	if (!s) {
		end_set(&plan->responder, &p->t.dst);
		plan->found = true;
		if (plan->responder.endpoint) /* a pod's own port */
			return REASON_NONE;
		s = service_of_address(&key, SCOPE_ANY, &address);
	}
	if (!s)
		return address & SVC_REFUSE ? REASON_SERVICE_PORT : REASON_NONE;
	plan->found = false;
	reason = service_refuses(s, p);
	if (reason)
		return reason;
	b = backend_pick(s, &p->t.src, flow_hash(&p->t, p->proto), &id);
	if (!b)
		return REASON_NO_BACKEND;
	plan->backend = id;
	plan->role = CT_PRE_NAT;
	plan->post.dst = b->addr;
	plan->post.dport = b->port;
	/* Hairpin: a pod drops packets from itself, so the Service's address stands in for it;
	 * replies to that address come back here. */
	if (addr_equal(&b->addr, &p->t.src))
		plan->post.src = p->t.dst;
	return REASON_NONE;
}

/**
 * admit - find the responder of a planned flow, and ask policy about it
 * @p: the flow's first packet
 * @plan: has its opener; gets the responder
 * @self: the endpoint that the packet came to; 0: the responder may be anywhere
 *
 * Return: enum drop_reason.
 */
global_fn int admit(struct pkt *p, struct plan *plan, __u32 self)
{
	struct judgment *j = judgment_begin();

	if (!p || !plan || !j)
		return REASON_POLICY_UNKNOWN;
	if (!plan->found)
		end_set(&plan->responder, &plan->post.dst);
	j->opener = p->t.src;
	j->responder = plan->post.dst;
	j->opener_id = plan->opener.endpoint;
	j->responder_id = end_of_hook(&plan->responder, &j->responder, self);
	j->port = bpf_ntohs(plan->post.dport);
	j->proto = p->proto;
	j->from_node = !!(plan->flags & CT_FROM_NODE);
	if (in_midst(p) && !j->from_node) {
		judgment_turn(bpf_ntohs(p->t.sport));
		if (!policy_judge())
			plan->flags |= CT_EITHER;
		judgment_turn(bpf_ntohs(plan->post.dport));
	}
	return policy_judge();
}

/**
 * nat_port - keep the flow's source port, or find another when a flow to the same backend has it
 * Return: enum drop_reason.
 */
global_fn int nat_port(struct plan *plan, __u8 proto, __u32 now)
{
	if (!plan)
		return REASON_NAT_PORTS;
	for (int i = 0; i < NAT_PORT_TRIES; i++) {
		if (!tuple_taken(&plan->post, proto, now, NULL, half_open_yields(i)))
			return REASON_NONE;
		plan->post.sport =
			bpf_htons(NAT_PORT_FIRST + bpf_get_prandom_u32() % NAT_PORT_COUNT);
	}
	return REASON_NAT_PORTS;
}

/**
 * create_flow - enter a planned flow, one half or both
 * @plan: with both ends
 *
 * Return: enum drop_reason.
 */
global_fn int create_flow(struct pkt *p, struct plan *plan, __u32 now)
{
	struct ct_entry e = {};

	if (!p || !plan)
		return REASON_CT_FULL;
	e.opener = plan->opener;
	e.responder = plan->responder;
	e.backend = plan->backend;
	e.flags = plan->flags;
	e.near = plan->near;
	if (plan->role == CT_PRE_NAT) {
		bool near = e.near;

		e.role = CT_POST_NAT;
		e.shadow = plan->scope;
		e.other = p->t;
		e.other.pad = plan->post.pad;
		if (ct_create(&plan->post, p->proto, CT_SCOPE_FLOW, &e, now))
			return REASON_CT_FULL;
		e.role = CT_PRE_NAT;
		e.other = plan->post;
		e.near = near;
	}
	if (ct_create(&p->t, p->proto, plan->scope, &e, now))
		return REASON_CT_FULL;
	plan->in_place = e.opening == CT_OPENING_IN_PLACE;
	plan->near = e.near;
	return REASON_NONE;
}

/* A flow is entered: nothing that was kept of its tuples holds. What the packet's own flow keeps from
 * now on does, unless somebody else changed it since the packet came. */
slow_fn int fast_forget_plan(struct pkt *p, const struct plan *plan)
{
	p->generation ^= fast_forget(p->t.src.words[3], p->t.dst.words[3], p->t.sport, p->t.dport);
	if (plan->role != CT_DIRECT)
		fast_forget(plan->post.src.words[3], plan->post.dst.words[3], plan->post.sport, plan->post.dport);
	return 0;
}

/**
 * socket_service - the Service that a packet's own socket was led away from, when it was at connect()
 * or sendmsg() that its backend was chosen
 */
inline_fn void socket_service(struct __sk_buff *skb, const struct pkt *p, struct event *e)
{
	struct sock_flow_key key = { .cookie = bpf_get_socket_cookie(skb), .addr = p->t.dst, .port = p->t.dport, .kind = SOCK_FLOW_BACK };
	struct sock_peer *peer = sock_slot_peer(p->proto, key.cookie);
	struct bpf_sock *sk = peer || !skb->sk ? NULL : bpf_sk_fullsock(skb->sk);
	struct sock_flow *flow;

	if (sk)
		peer = bpf_sk_storage_get(&mst_sock_peers_v1, sk, NULL, 0);

	if (peer && peer->backend_port == p->t.dport && addr_equal(&peer->backend_addr, &p->t.dst)) {
		if (peer->frontend_port == p->t.dport && addr_equal(&peer->frontend, &p->t.dst)) /* or it went there itself */
			return;
		e->frontend = peer->frontend;
		e->frontend_port = peer->frontend_port;
		e->backend = peer->backend;
	} else {
		flow = key.cookie ? bpf_map_lookup_elem(&mst_sock_flows_v1, &key) : NULL;
		if (!flow || (flow->port == p->t.dport && addr_equal(&flow->addr, &p->t.dst)))
			return;
		e->frontend = flow->addr;
		e->frontend_port = flow->port;
		e->backend = flow->backend;
	}
	e->target = p->t.dst;
	e->target_port = p->t.dport;
}

/**
 * event_opened - tell of a new flow, if anybody reads it, before its first packet is translated
 */
global_fn int event_opened(struct __sk_buff *skb, struct pkt *p, struct plan *plan, __u32 dir, __u32 now)
{
	struct event *e;

	if (!p || !plan || !observed(now))
		return 0;
	e = event_of(skb, p, dir);
	if (!e)
		return 0;
	e->kind = EVENT_OPENED;
	event_judged(e);
	e->src_endpoint = plan->opener.endpoint;
	e->dst_endpoint = plan->responder.endpoint;
	if (plan->backend) {
		e->frontend = p->t.dst;
		e->frontend_port = p->t.dport;
		e->target = plan->post.dst;
		e->target_port = plan->post.dport;
		e->backend = plan->backend;
	} else if (dir == DIR_FROM_POD) {
		socket_service(skb, p, e);
	}
	return event_send(e, now);
}
