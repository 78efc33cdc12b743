// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
/*
 * Services at the socket: connect() and sendmsg() go to a backend from the
 * start, so no packet needs translating; getpeername() and recvmsg() show the
 * Service's address again. Only sockets of namespaces in mst_netns_v1 are ours.
 */
#include "lib/common.h"
#include "lib/lb.h"
#include "lib/sock_choose.h"
#include "lib/sock_peer.h"
#include "lib/sock_send.h"
#include "lib/sock_slot.h"

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

	sock_slot_free(sk->protocol, cookie);
	if (sk->protocol == IPPROTO_UDP) {
		peer = bpf_sk_storage_get(&mst_sock_peers_v1, sk, NULL, 0);
		if (peer)
			connected_forget(cookie, peer);
	}
	return ALLOW;
}

char __license[] SEC("license") = "Dual BSD/GPL";
