/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * A new flow at the edge: its backend, the address and port that it wears for
 * that one, and its entries.
 */
#pragma once

#include "common.h"
#include "conntrack.h"
#include "edge.h"
#include "forget.h"
#include "lb.h"
#include "parse.h"
#include "remote.h"
#include "wear.h"

/* Whether an address that no endpoint has is the node's own. Not all of those take node ports. */
inline_fn bool of_node(const struct addr *a)
{
	struct identity *who;

	if (worn_at(EDGE_WIRE, a) || of_this_node(a) || address_flags(a) & SVC_NODE)
		return true;
	if (!from_door)
		return false;
	who = grown_find(&mst_identities_v1_now, a);
	return who && who->pod == IDENTITY_NODE;
}

/* What a new flow from outside becomes. */
struct edge_plan {
	struct tuple post; /* what the backend sees */
	__u32 backend;     /* id */
	__u32 endpoint;    /* the backend's, on this node; 0: none */
	__u8 host;         /* 1: the backend is the node itself */
	__u8 wear;         /* 1: the flow wears the node's address */
	__u8 stand_in;     /* 1: only the port tells the backend's answers, to the node, from others */
	__u8 pad[5];
};

/**
 * edge_source - the source that the backend sees: the node's address, if it is that, with a port of its own
 * Return: enum drop_reason.
 */
global_fn int edge_source(struct __sk_buff *skb, struct pkt *p, struct edge_plan *plan, __u32 now)
{
	struct edge_config *c = edge_config(EDGE_WIRE);
	__u32 try;

	if (!p || !plan || !c)
		return REASON_NAT_PORTS;
	if (!plan->wear) {
		if (!plan->stand_in && !tuple_taken(&plan->post, p->proto, now, NULL, false) &&
		    !(plan->host && host_connected(skb, &plan->post, p))) /* the client's own to that port */
			return REASON_NONE;
	} else if (addr_is_zero(&plan->post.src)) {
		return REASON_NAT_PORTS;
	}
	try = wear_first_port(p);
	for (int i = 0; i < NAT_PORT_TRIES; i++, try = bpf_get_prandom_u32()) {
		plan->post.sport = wear_port(c, try);
		if (plan->stand_in && plan->post.sport == 0xffff) /* for which there is no routing rule */
			continue;
		if (plan->wear ? wear_free(skb, p, &plan->post, now, i) :
				 !tuple_taken(&plan->post, p->proto, now, NULL, half_open_yields(i)))
			return REASON_NONE;
	}
	return REASON_NAT_PORTS;
}

/* The address that a flow wears, zero when there is none. A node that is reached through the tunnel takes no other
 * address of ours there, and knows by it that the answer goes back through it; any other node knows us best by the
 * one between nodes, if answers to it are seen here. */
inline_fn void edge_wear(struct edge_plan *plan, bool ipv6)
{
	struct remote *r = plan->endpoint ? NULL : remote_of(remote_find(&plan->post.dst));
	struct edge_config *c = edge_config(r && r->flags & REMOTE_TUNNEL ? EDGE_TUNNEL : EDGE_WIRE);
	struct node_config *n = r && !(r->flags & REMOTE_TUNNEL) ? node_config() : NULL;
	struct addr own = {};

	if (n)
		own = ipv6 ? n->ip6 : n->ip4;
	if (n && address_flags(&own) & SVC_NODE)
		plan->post.src = own;
	else if (c)
		plan->post.src = ipv6 ? c->ip6 : c->ip4;
	else
		__builtin_memset(&plan->post.src, 0, sizeof(plan->post.src));
}

/**
 * edge_plan_backend - pick the backend of a new flow, and say who carries the answers
 * @s: its Service
 *
 * Return: enum drop_reason.
 */
slow_fn int edge_plan_backend(struct __sk_buff *skb, struct pkt *p, const struct service *s, struct edge_plan *plan)
{
	struct backend *b = backend_pick(s, &p->t.src, flow_hash(&p->t, p->proto), &plan->backend);
	struct endpoint *ep;
	struct addr to;

	if (!b)
		return REASON_NO_BACKEND;
	to = b->addr;
	plan->post.dst = to;
	plan->post.dport = b->port;
	plan->endpoint = endpoint_of(&to);
	plan->host = !plan->endpoint && of_node(&to);
	ep = plan->endpoint ? endpoint_slot(plan->endpoint) : NULL;
	if (from_door) {
		/* Without the address at the NIC, only a host end knows whose the answer is; the node would
		 * answer itself past the door, but for what the Service's address stands in for. Of its own
		 * addresses, it takes a port of the edge's, too: those lead into the door. */
		plan->wear = !plan->host && !(ep && ep->flags & EP_HOST_END);
		if (plan->host) {
			plan->post.src = p->t.dst;
			plan->stand_in = of_node(&p->t.dst);
		}
	} else {
		/* A pod that a child of the NIC connects answers past the node's stack already. */
		plan->wear = !(s->flags & SVC_KEEP_SOURCE) && !plan->host && !(ep && ep->flags & EP_IN_POD);
	}
	if (plan->wear && of_tunnel(p->proto, plan->post.dport))
		return REASON_TUNNEL_PORT;
	if (plan->wear)
		edge_wear(plan, p->ipv6);
	return REASON_NONE;
}

/* Enters both halves. Only the client's knows the endpoint: its own program judges what enters it. */
slow_fn int edge_enter(struct pkt *p, struct edge_plan *plan, __u32 now)
{
	struct ct_entry e = { .role = CT_POST_NAT, .flags = CT_EDGE, .near = 1, .backend = plan->backend, .other = p->t };

	if (from_door)
		e.flags |= CT_FROM_NODE;
	if (ct_create(&plan->post, p->proto, CT_SCOPE_FLOW, &e, now))
		return REASON_CT_FULL;
	fast_forget(plan->post.src.words[3], plan->post.dst.words[3], plan->post.sport, plan->post.dport);
	e.role = CT_PRE_NAT;
	e.near = 1;
	e.other = plan->post;
	e.responder.endpoint = plan->endpoint;
	if (ct_create(&p->t, p->proto, CT_SCOPE_FLOW, &e, now))
		return REASON_CT_FULL;
	p->generation ^= fast_forget(p->t.src.words[3], p->t.dst.words[3], p->t.sport, p->t.dport);
	return REASON_NONE;
}
