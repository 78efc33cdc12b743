/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a connected socket was told, and where it really goes: a TCP socket's in a
 * slot of its own (sock_slot.h) if that is free, else with the socket; a UDP
 * socket's with it, and once more for socket diagnosis.
 */
#pragma once

#include "common.h"
#include "sock_slot.h"

struct dest {
	struct addr addr;
	__be16 port;
};

/* What is known of a UDP socket that is led to a backend, under the socket's own number. */
inline_fn void connected_key(struct sock_flow_key *key, __u64 cookie, const struct sock_peer *peer)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->cookie = cookie;
	key->addr = peer->backend_addr;
	key->port = peer->backend_port;
	key->kind = SOCK_FLOW_CONNECTED;
}

inline_fn void connected_forget(__u64 cookie, const struct sock_peer *peer)
{
	struct sock_flow_key key;

	connected_key(&key, cookie, peer);
	bpf_map_delete_elem(&mst_sock_flows_v1, &key);
}

/* What an earlier connect() left must not speak for the socket. */
slow_fn int forget_peer(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct sock_peer *peer;

	if (!sk)
		return 0;
	if (ctx->protocol == IPPROTO_TCP)
		sock_slot_free(bpf_get_socket_cookie(ctx));
	if (ctx->protocol == IPPROTO_UDP) {
		peer = bpf_sk_storage_get(&mst_sock_peers_v1, sk, NULL, 0);
		if (peer)
			connected_forget(bpf_get_socket_cookie(ctx), peer);
	}
	bpf_sk_storage_delete(&mst_sock_peers_v1, sk);
	return 0;
}

/* The socket was led to a backend: getpeername() shows the frontend. */
slow_fn int remember_peer(struct bpf_sock_addr *ctx, const struct sock_peer *peer)
{
	struct sock_flow there = { .addr = peer->frontend, .port = peer->frontend_port, .backend = peer->backend };
	struct bpf_sock *sk = ctx->sk;
	struct sock_flow_key key;
	struct sock_peer *stored;

	if (!sk)
		return 0;
	if (ctx->protocol == IPPROTO_TCP &&
	    sock_slot_take(bpf_get_socket_cookie(ctx), bpf_get_netns_cookie(ctx), peer)) {
		bpf_sk_storage_delete(&mst_sock_peers_v1, sk); /* of an earlier connect() */
		return 0;
	}
	if (ctx->protocol == IPPROTO_UDP) {
		forget_peer(ctx);
		connected_key(&key, bpf_get_socket_cookie(ctx), peer);
		bpf_map_update_elem(&mst_sock_flows_v1, &key, &there, BPF_ANY);
	}
	stored = bpf_sk_storage_get(&mst_sock_peers_v1, sk, (void *)peer, BPF_SK_STORAGE_GET_F_CREATE);
	if (stored)
		*stored = *peer;
	return 0;
}

/* The backend of a connected UDP socket that names, once more, the Service to which it is connected: it takes answers from
 * there alone. Or the backend, as the kernel does for a socket of IPv6 with each send() to IPv4. */
inline_fn bool peer_backend(struct bpf_sock_addr *ctx, struct dest *d)
{
	struct bpf_sock *sk = ctx->sk;
	struct sock_peer *peer;

	if (!sk || sk->state != BPF_TCP_ESTABLISHED)
		return false;
	peer = bpf_sk_storage_get(&mst_sock_peers_v1, sk, NULL, 0);
	if (!peer)
		return false;
	if (!addr_equal(&peer->frontend, &d->addr) || peer->frontend_port != d->port)
		return addr_equal(&peer->backend_addr, &d->addr) && peer->backend_port == d->port;
	d->addr = peer->backend_addr;
	d->port = peer->backend_port;
	return true;
}

/* The Service's address for a connected socket whose peer is @d. */
inline_fn bool peer_frontend(struct bpf_sock_addr *ctx, struct dest *d)
{
	struct bpf_sock *sk = ctx->sk;
	struct sock_peer *peer = NULL;

	if (!sk)
		return false;
	if (ctx->protocol == IPPROTO_TCP)
		peer = sock_slot_peer(bpf_get_socket_cookie(ctx));
	if (!peer)
		peer = bpf_sk_storage_get(&mst_sock_peers_v1, sk, NULL, 0);
	if (!peer || !addr_equal(&peer->backend_addr, &d->addr) || peer->backend_port != d->port)
		return false;
	d->addr = peer->frontend;
	d->port = peer->frontend_port;
	return true;
}
