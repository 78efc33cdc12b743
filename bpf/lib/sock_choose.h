/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What connect() and sendmsg() have in common: whose socket it is, which Service
 * its address means there, a backend of it, or a refusal.
 */
#pragma once

#include "common.h"
#include "events.h"
#include "lb.h"
#include "sock_peer.h"

#define INADDR_LOOPBACK 0x7f000001
#define ECONNREFUSED 111
#define EHOSTUNREACH 113
#define ALLOW 1
#define REFUSE 0

/* The namespace of a socket that is ours and gets Services here; NULL for others. */
inline_fn struct netns_info *socket_netns(struct bpf_sock_addr *ctx)
{
	__u64 cookie = bpf_get_netns_cookie(ctx);
	struct netns_info *ns = bpf_map_lookup_elem(&mst_netns_v1, &cookie);

	return ns && ns->flags & EP_SERVICE_SOCKET ? ns : NULL;
}

/* The unspecified address is loopback's, which the kernel makes of it behind this. Node ports have it in the table. */
inline_fn void name_loopback(struct dest *d)
{
	if (addr_is_ipv4(&d->addr) && !d->addr.words[3])
		d->addr.words[3] = bpf_htonl(INADDR_LOOPBACK);
	else if (addr_is_zero(&d->addr))
		d->addr.quads[1] = bpf_cpu_to_be64(1);
}

/* Loopback is each namespace's own: frontends there are for the sockets of the node's. */
inline_fn __u8 scope_of(const struct netns_info *ns, const struct addr *to)
{
	bool v4 = addr_is_ipv4(to) && to->bytes[12] == 127;
	bool v6 = !to->quads[0] && to->quads[1] == bpf_cpu_to_be64(1);

	if (!v4 && !v6)
		return SCOPE_ANY;
	return ns->flags & EP_NODE ? SCOPE_NODE : SCOPE_NOBODY;
}

/**
 * client_of - the address that a socket's packets will have, as far as it is known here
 * @to: where they go: the family counts
 * @a: zero when it is not known
 */
slow_fn int client_of(const struct netns_info *ns, const struct addr *to, struct addr *a)
{
	bool v4 = addr_is_ipv4(to);
	struct edge_config *node;
	struct endpoint *ep;
	__u32 zero = 0;

	__builtin_memset(a, 0, sizeof(*a));
	if (ns->flags & EP_NODE) {
		node = bpf_map_lookup_elem(&mst_edge_v2, &zero);
		if (node)
			*a = v4 ? node->ip4 : node->ip6;
		return 0;
	}
	ep = endpoint_slot(ns->endpoint);
	if (ep)
		*a = v4 ? ep->ip4 : ep->ip6;
	return 0;
}

/* On the stack: another program may interrupt this one, and use the CPU's room meanwhile. */
global_fn int event_refused(const struct netns_info *ns, const struct dest *d, __u8 proto, __u32 reason, __u32 now)
{
	struct event e = { .kind = EVENT_STOPPED, .verdict = EVENT_REFUSED, .direction = DIR_SOCKET };
	struct event_room *room = event_room();
	__u32 whom = room ? stopped_for(room, now) : 0;
	struct endpoint *ep;

	if (!ns || !d || !whom)
		return 0;
	ep = endpoint_slot(ns->endpoint);
	if (ep)
		e.t.src = addr_is_ipv4(&d->addr) ? ep->ip4 : ep->ip6;
	e.t.dst = d->addr;
	e.t.dport = d->port;
	e.proto = proto;
	e.reason = reason;
	e.endpoint = ns->endpoint;
	e.src_endpoint = ns->endpoint;
	return event_stopped_send(&e, whom, now);
}

/* Return: REFUSE, for the program to return. */
inline_fn int refuse(struct bpf_sock_addr *ctx, const struct netns_info *ns, const struct dest *d, __u32 reason)
{
	__u32 slot = reason * DIR_COUNT + DIR_SOCKET;
	struct counter *c = bpf_map_lookup_elem(&mst_drops_v1, &slot);
	bool answer = reason == REASON_NO_BACKEND || reason == REASON_SERVICE_PORT;

	if (c)
		c->packets++;
	opaque(ctx); /* else the compiler keeps the address of a field of it, which the verifier refuses */
	event_refused(ns, d, ctx->protocol, reason, now_seconds());
	if (has_set_retval)
		bpf_set_retval(answer ? -ECONNREFUSED : -EHOSTUNREACH);
	return REFUSE;
}

enum outcome {
	KEEP,   /* not a Service: leave the address */
	REWRITE,
	REFUSED,
};

/* The socket goes to a backend itself: from now on what comes from there is the backend's. */
inline_fn int straight(struct bpf_sock_addr *ctx, struct sock_peer *told, const struct dest *d)
{
	struct sock_flow_key key = { .addr = d->addr, .port = d->port, .kind = SOCK_FLOW_BACK };
	struct sock_flow *back;

	if (told && led_to(told, d)) {
		told->frontend = d->addr;
		told->frontend_port = d->port;
		return KEEP;
	}
	key.cookie = bpf_get_socket_cookie(ctx);
	back = bpf_map_lookup_elem(&mst_sock_flows_v1, &key);
	if (back && (back->port != d->port || !addr_equal(&back->addr, &d->addr))) {
		back->addr = d->addr;
		back->port = d->port;
	}
	return KEEP;
}

/* The socket connects elsewhere than to a Service. */
inline_fn int keep(struct bpf_sock_addr *ctx, const struct dest *d)
{
	forget_peer(ctx);
	return ctx->protocol == IPPROTO_UDP ? straight(ctx, NULL, d) : KEEP;
}

/**
 * balance - a backend of the Service that a socket means
 * @d: the Service's address, as the socket names it
 * @client: the socket's address
 * @s: the Service; NULL afterwards: leave the socket's packets alone
 * @id: where the backend's id goes
 *
 * What is to be dropped without a word is left to the packet programs where there are any, so
 * that a connection waits as it would elsewhere, and comes about when a backend does.
 *
 * Return: NULL when there is none; with @s it was refused.
 */
inline_fn struct backend *balance(struct bpf_sock_addr *ctx, const struct netns_info *ns, const struct dest *d,
				  const struct addr *client, struct service **s, __u32 *id)
{
	struct backend *b;
	int reason;

	reason = service_closed(*s, client);
	if ((reason == REASON_NO_LOCAL_BACKEND || reason == REASON_SOURCE_RANGE) && ns->flags & EP_SERVICE_TC) {
		*s = NULL;
		return NULL;
	}
	b = reason ? NULL : backend_pick(*s, client, bpf_get_prandom_u32(), id);
	if (!b)
		refuse(ctx, ns, d, reason ? reason : REASON_NO_BACKEND);
	return b;
}

/* Whether a port that is no Service's is refused, by what its address is. A pod has its own ports. */
inline_fn bool refused(const struct dest *d, __u16 address)
{
	return address & SVC_REFUSE && !endpoint_of(&d->addr);
}
