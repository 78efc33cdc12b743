// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Services at the socket: connect() and sendmsg() go to a backend from the
 * start, so no packet needs translating; getpeername() and recvmsg() show the
 * Service's address again. Only sockets of namespaces in mst_netns_v1 are ours.
 */
#include "lib/common.h"
#include "lib/events.h"
#include "lib/lb.h"
#include "lib/sock_peer.h"
#include "lib/sock_slot.h"

#define INADDR_LOOPBACK 0x7f000001
#define ECONNREFUSED 111
#define EHOSTUNREACH 113
#define ALLOW 1
#define REFUSE 0

inline_fn void dest_load4(struct dest *d, struct bpf_sock_addr *ctx)
{
	addr_from_ipv4(&d->addr, ctx->user_ip4);
	d->port = ctx->user_port;
}

inline_fn void dest_load6(struct dest *d, struct bpf_sock_addr *ctx)
{
	d->addr.words[0] = ctx->user_ip6[0];
	d->addr.words[1] = ctx->user_ip6[1];
	d->addr.words[2] = ctx->user_ip6[2];
	d->addr.words[3] = ctx->user_ip6[3];
	d->port = ctx->user_port;
}

inline_fn void dest_store4(struct bpf_sock_addr *ctx, const struct dest *d)
{
	ctx->user_ip4 = d->addr.words[3];
	ctx->user_port = d->port;
}

inline_fn void dest_store6(struct bpf_sock_addr *ctx, const struct dest *d)
{
	ctx->user_ip6[0] = d->addr.words[0];
	ctx->user_ip6[1] = d->addr.words[1];
	ctx->user_ip6[2] = d->addr.words[2];
	ctx->user_ip6[3] = d->addr.words[3];
	ctx->user_port = d->port;
}

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

/**
 * connect_to - choose where a connecting socket goes
 * @d: the destination; a backend's on REWRITE
 *
 * Return: enum outcome.
 */
inline_fn int connect_to(struct bpf_sock_addr *ctx, struct dest *d)
{
	struct netns_info *ns = socket_netns(ctx);
	struct sock_peer peer = {};
	struct addr client;
	struct service *s;
	struct backend *b;
	__u16 address;

	if (!ns)
		return KEEP;
	name_loopback(d);
	s = service_find(&d->addr, d->port, ctx->protocol, scope_of(ns, &d->addr), &address);
	if (!s) {
		opaque(ctx); /* else the compiler adds to it what it shares with another branch, which the kernel refuses */
		/* UDP sends nothing yet: many ask so which address of their own leads there, at any port. */
		if (!refused(d, address) || (ctx->protocol == IPPROTO_UDP && ns->flags & EP_SERVICE_TC))
			return keep(ctx, d);
		refuse(ctx, ns, d, REASON_SERVICE_PORT);
		return REFUSED;
	}
	client_of(ns, &d->addr, &client);
	b = balance(ctx, ns, d, &client, &s, &peer.backend);
	if (!b)
		return s ? REFUSED : keep(ctx, d);
	peer.frontend = d->addr;
	peer.frontend_port = d->port;
	peer.backend_addr = b->addr;
	peer.backend_port = b->port;
	peer.service = s->number;
	d->addr = b->addr;
	d->port = b->port;
	remember_peer(ctx, &peer);
	return REWRITE;
}

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

SEC("cgroup/connect4")
int mst_connect4(struct bpf_sock_addr *ctx)
{
	struct dest d = {};
	int outcome;

	dest_load4(&d, ctx);
	outcome = connect_to(ctx, &d);
	if (outcome == REWRITE)
		dest_store4(ctx, &d);
	return outcome == REFUSED ? REFUSE : ALLOW;
}

SEC("cgroup/connect6")
int mst_connect6(struct bpf_sock_addr *ctx)
{
	struct dest d = {};
	int outcome;

	dest_load6(&d, ctx);
	outcome = connect_to(ctx, &d);
	if (outcome == REWRITE)
		dest_store6(ctx, &d);
	return outcome == REFUSED ? REFUSE : ALLOW;
}

SEC("cgroup/sendmsg4")
int mst_sendmsg4(struct bpf_sock_addr *ctx)
{
	struct dest d = {};
	int outcome;

	dest_load4(&d, ctx);
	outcome = send_to(ctx, &d);
	if (outcome == REWRITE)
		dest_store4(ctx, &d);
	return outcome == REFUSED ? REFUSE : ALLOW;
}

SEC("cgroup/sendmsg6")
int mst_sendmsg6(struct bpf_sock_addr *ctx)
{
	struct dest d = {};
	int outcome;

	dest_load6(&d, ctx);
	outcome = send_to(ctx, &d);
	if (outcome == REWRITE)
		dest_store6(ctx, &d);
	return outcome == REFUSED ? REFUSE : ALLOW;
}

SEC("cgroup/recvmsg4")
int mst_recvmsg4(struct bpf_sock_addr *ctx)
{
	struct dest d = {};

	dest_load4(&d, ctx);
	if (received_from(ctx, &d))
		dest_store4(ctx, &d);
	return ALLOW;
}

SEC("cgroup/recvmsg6")
int mst_recvmsg6(struct bpf_sock_addr *ctx)
{
	struct dest d = {};

	dest_load6(&d, ctx);
	if (received_from(ctx, &d))
		dest_store6(ctx, &d);
	return ALLOW;
}

SEC("cgroup/getpeername4")
int mst_getpeername4(struct bpf_sock_addr *ctx)
{
	struct dest d = {};

	dest_load4(&d, ctx);
	if (peer_frontend(sock_told(ctx), &d))
		dest_store4(ctx, &d);
	return ALLOW;
}

SEC("cgroup/getpeername6")
int mst_getpeername6(struct bpf_sock_addr *ctx)
{
	struct dest d = {};

	dest_load6(&d, ctx);
	if (peer_frontend(sock_told(ctx), &d))
		dest_store6(ctx, &d);
	return ALLOW;
}

/* A socket is closed: nobody asks it anything any more. */
SEC("cgroup/sock_release")
int mst_release(struct bpf_sock *sk)
{
	__u64 cookie = bpf_get_socket_cookie(sk);
	struct sock_peer *peer;

	if (sk->protocol == IPPROTO_TCP) {
		sock_slot_free(IPPROTO_TCP, cookie);
	} else if (sk->protocol == IPPROTO_UDP) {
		sock_slot_free(IPPROTO_UDP, cookie);
		peer = bpf_sk_storage_get(&mst_sock_peers_v1, sk, NULL, 0);
		if (peer)
			connected_forget(cookie, peer);
	}
	return ALLOW;
}

char __license[] SEC("license") = "Dual BSD/GPL";
