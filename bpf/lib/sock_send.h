/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Datagrams whose sender names an address: each goes to the backend that the
 * socket has of that Service, and what comes from there is the Service's.
 */
#pragma once

#include "common.h"
#include "lb.h"
#include "sock_choose.h"
#include "sock_peer.h"

/* Whether a backend is still what it was when a socket was led there. */
inline_fn bool backend_is(__u32 id, const struct addr *a, __be16 port)
{
	struct backend *b = grown_find(&mst_backends_v1_now, &id);

	return b && b->port == port && addr_equal(&b->addr, a);
}

/* The choice made earlier for this socket and its first Service, while the Service has that backend: whoever takes it away
 * clears the slot, and moves the tables' number. */
inline_fn bool told_backend(const struct sock_peer *told, struct sock_flow *there)
{
	there->addr = told->backend_addr;
	there->port = told->backend_port;
	there->backend = told->backend;
	return (!told->tables || told->tables == tables_generation()) && backend_is(there->backend, &there->addr, there->port);
}

/* The choice made earlier for this socket and another frontend, while that backend exists. */
inline_fn bool flow_backend(const struct sock_flow_key *key, struct sock_flow *there)
{
	struct sock_flow *flow = bpf_map_lookup_elem(&mst_sock_flows_v1, key);

	if (!flow)
		return false;
	*there = *flow;
	return backend_is(there->backend, &there->addr, there->port);
}

/**
 * ask_first - have an unconnected socket keep a backend of the first Service that it asks, and the way back
 * @d: the Service's address
 * @there: the backend
 *
 * Return: false when there is no room for it, or the socket reaches this backend by another Service already.
 */
slow_fn bool ask_first(struct bpf_sock_addr *ctx, const struct dest *d, const struct sock_flow *there, const struct service *s)
{
	struct sock_flow_key key = { .addr = there->addr, .port = there->port, .kind = SOCK_FLOW_BACK };
	struct sock_peer peer = {
		.frontend = d->addr,
		.frontend_port = d->port,
		.backend_addr = there->addr,
		.backend_port = there->port,
		.backend = there->backend,
		.service = s->number,
	};

	key.cookie = bpf_get_socket_cookie(ctx);
	if (bpf_map_lookup_elem(&mst_sock_flows_v1, &key))
		return false;
	return slot_peer(ctx, &peer) || store_peer(ctx, &peer);
}

/**
 * way_back - have the socket take what comes from a backend for the Service's
 * @told: of the socket's first Service, or NULL
 * @d: the Service's address
 * @there: the backend
 *
 * With each datagram, not the first alone: while a server is slow nobody looks at its way back, and the table gives
 * the entry's room away.
 *
 * Return: false when the socket reaches this backend by another Service already. A datagram from it could not be told
 * apart, so this one is left to NAT, which gives it a port of its own; where there is none, the Service that was
 * asked last has the answers.
 */
inline_fn bool way_back(const struct netns_info *ns, __u64 cookie, struct sock_peer *told, const struct dest *d,
			const struct sock_flow *there)
{
	struct sock_flow_key key = { .cookie = cookie, .addr = there->addr, .port = there->port, .kind = SOCK_FLOW_BACK };
	struct sock_flow back = { .addr = d->addr, .port = d->port, .backend = there->backend };
	struct dest from = { .addr = there->addr, .port = there->port };
	struct sock_flow *known;

	if (told && led_to(told, &from)) {
		if (ns->flags & EP_SERVICE_TC)
			return false;
		told->frontend = d->addr;
		told->frontend_port = d->port;
		return true;
	}
	known = bpf_map_lookup_elem(&mst_sock_flows_v1, &key);
	if (known && known->port == d->port && addr_equal(&known->addr, &d->addr))
		return true;
	if (known && ns->flags & EP_SERVICE_TC)
		return false;
	bpf_map_update_elem(&mst_sock_flows_v1, &key, &back, BPF_ANY);
	return true;
}

/**
 * send_to - choose where a datagram goes whose sender names an address
 * @d: the destination; a backend's on REWRITE
 *
 * Return: enum outcome.
 */
inline_fn int send_to(struct bpf_sock_addr *ctx, struct dest *d)
{
	struct netns_info *ns = socket_netns(ctx);
	struct sock_flow there = {};
	struct sock_flow_key key;
	struct sock_peer *told;
	bool first, chosen;
	struct addr client;
	struct service *s;
	struct backend *b;
	__u16 address;

	if (!ns)
		return KEEP;
	name_loopback(d);
	told = sock_told(ctx);
	if (peer_backend(ctx, told, d))
		return REWRITE;
	s = service_find(&d->addr, d->port, ctx->protocol, scope_of(ns, &d->addr), &address);
	if (!s) {
		if (!refused(d, address))
			return straight(ctx, told, d);
		refuse(ctx, ns, d, REASON_SERVICE_PORT);
		return REFUSED;
	}
	first = !told || told_of(told, d);
	if (told && first && told_backend(told, &there)) {
		d->addr = there.addr;
		d->port = there.port;
		return REWRITE;
	}
	key = (struct sock_flow_key){ .cookie = bpf_get_socket_cookie(ctx), .addr = d->addr, .port = d->port };
	chosen = flow_backend(&key, &there);
	if (!chosen) {
		client_of(ns, &d->addr, &client);
		b = balance(ctx, ns, d, &client, &s, &there.backend);
		if (!b)
			return s ? REFUSED : KEEP;
		there.addr = b->addr;
		there.port = b->port;
	}
	if (chosen || !first || !ask_first(ctx, d, &there, s)) {
		if (!way_back(ns, key.cookie, told, d, &there))
			return KEEP;
		if (!chosen)
			bpf_map_update_elem(&mst_sock_flows_v1, &key, &there, BPF_ANY);
	}
	d->addr = there.addr;
	d->port = there.port;
	return REWRITE;
}

/* The Service's address for a datagram that came from @d. One that a connected socket takes is from its peer. */
inline_fn bool received_from(struct bpf_sock_addr *ctx, struct dest *d)
{
	struct sock_flow_key key = { .addr = d->addr, .port = d->port, .kind = SOCK_FLOW_BACK };
	struct sock_flow *flow;

	if (peer_frontend(sock_told(ctx), d))
		return true;
	key.cookie = bpf_get_socket_cookie(ctx);
	flow = bpf_map_lookup_elem(&mst_sock_flows_v1, &key);
	if (!flow)
		return false;
	d->addr = flow->addr;
	d->port = flow->port;
	return true;
}
