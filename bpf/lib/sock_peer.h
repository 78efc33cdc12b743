/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * What a socket was told, and where its packets really go: in a slot of its own
 * (sock_slot.h) if that is free, else stored with it; what is stored with a
 * connected UDP socket once more for socket diagnosis. Of an unconnected UDP
 * socket it is the first Service that it asked, and the way back from there.
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

/* Return: what a socket was told; NULL: nothing. */
inline_fn struct sock_peer *sock_told(struct bpf_sock_addr *ctx)
{
	struct sock_peer *peer = sock_slot_peer(ctx->protocol, bpf_get_socket_cookie(ctx));
	struct bpf_sock *sk = ctx->sk;

	return peer || !sk ? peer : bpf_sk_storage_get(&mst_sock_peers_v1, sk, NULL, 0);
}

/* Whether a socket was told of this frontend, or led to this backend. */
inline_fn bool told_of(const struct sock_peer *peer, const struct dest *d)
{
	return peer->frontend_port == d->port && addr_equal(&peer->frontend, &d->addr);
}

inline_fn bool led_to(const struct sock_peer *peer, const struct dest *d)
{
	return peer->backend_port == d->port && addr_equal(&peer->backend_addr, &d->addr);
}

/* Forgets what is stored with a socket. */
slow_fn int unstore_peer(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct sock_peer *peer = sk ? bpf_sk_storage_get(&mst_sock_peers_v1, sk, NULL, 0) : NULL;

	if (!peer)
		return 0;
	if (ctx->protocol == IPPROTO_UDP)
		connected_forget(bpf_get_socket_cookie(ctx), peer);
	bpf_sk_storage_delete(&mst_sock_peers_v1, sk);
	return 0;
}

/* What was told earlier must not speak for the socket. */
slow_fn int forget_peer(struct bpf_sock_addr *ctx)
{
	sock_slot_free(ctx->protocol, bpf_get_socket_cookie(ctx));
	return unstore_peer(ctx);
}

/* Keeps what a socket is told in its slot. Return: false: it has none. */
slow_fn bool slot_peer(struct bpf_sock_addr *ctx, const struct sock_peer *peer)
{
	if (!sock_slot_take(ctx, peer))
		return false;
	unstore_peer(ctx); /* when it had none */
	return true;
}

/* Stores what a socket is told with it. Return: false: there was no memory. */
inline_fn bool store_peer(struct bpf_sock_addr *ctx, struct sock_peer *peer)
{
	struct bpf_sock *sk = ctx->sk;
	struct sock_peer *stored;

	if (!sk)
		return false;
	peer->tables = tables_generation();
	stored = bpf_sk_storage_get(&mst_sock_peers_v1, sk, peer, BPF_SK_STORAGE_GET_F_CREATE);
	if (stored)
		*stored = *peer;
	return stored;
}

/* The socket is led to a backend: getpeername() shows the frontend. */
slow_fn int remember_peer(struct bpf_sock_addr *ctx, struct sock_peer *peer)
{
	struct sock_flow there = { .addr = peer->frontend, .port = peer->frontend_port, .backend = peer->backend };
	struct sock_flow_key key;

	if (slot_peer(ctx, peer))
		return 0;
	unstore_peer(ctx);
	if (ctx->protocol == IPPROTO_UDP) {
		connected_key(&key, bpf_get_socket_cookie(ctx), peer);
		bpf_map_update_elem(&mst_sock_flows_v1, &key, &there, BPF_ANY);
	}
	store_peer(ctx, peer);
	return 0;
}

/* The backend of a connected UDP socket that names, once more, the Service to which it is connected: it takes answers from
 * there alone. Or the backend, as the kernel does for a socket of IPv6 with each send() to IPv4. */
inline_fn bool peer_backend(struct bpf_sock_addr *ctx, const struct sock_peer *peer, struct dest *d)
{
	struct bpf_sock *sk = ctx->sk;

	if (!peer || !sk || sk->state != BPF_TCP_ESTABLISHED)
		return false;
	if (!told_of(peer, d))
		return led_to(peer, d);
	d->addr = peer->backend_addr;
	d->port = peer->backend_port;
	return true;
}

/* The Service's address for a socket whose peer, or who sent to it, is @d. */
inline_fn bool peer_frontend(const struct sock_peer *peer, struct dest *d)
{
	if (!peer || !led_to(peer, d))
		return false;
	d->addr = peer->frontend;
	d->port = peer->frontend_port;
	return true;
}
