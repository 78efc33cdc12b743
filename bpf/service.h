/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/*
 * Services: the types of frontends and backends, and of what is known of sockets
 * that were led to one; shared with Go as types.h is.
 */
#pragma once

#include "types.h"

enum frontend_scope {
	SCOPE_ANY = 0,
	SCOPE_OUTSIDE = 1, /* for clients outside the cluster, where they have backends of their own */
	SCOPE_NODE = 2,    /* for the node's own sockets: loopback addresses */
	SCOPE_NOBODY = 3,  /* has no entries */
};

/* proto 0 and port 0: the address itself is a Service's (see SVC_ADDRESS). A node port has the
 * unspecified address of its family: it is looked for behind an address marked SVC_NODE. */
struct service_key {
	struct addr addr;
	__be16 port;
	__u8 proto;
	__u8 scope; /* enum frontend_scope */
	__u32 pad;
};
_Static_assert(sizeof(struct service_key) == 24, "service_key");

enum service_flag {
	/* Of an address; such an entry has no backends itself. */
	SVC_ADDRESS = 1, /* it has frontends, or is the node's */
	SVC_REFUSE = 2,  /* it is the cluster's own: ports that are no frontend are refused */
	SVC_NODE = 4,    /* it is the node's, and takes node ports */
	/* Of a frontend. */
	SVC_SPLIT = 8,        /* clients from outside: see SCOPE_OUTSIDE */
	SVC_DROP = 16,        /* the traffic policy leaves this node no backend: drop, do not refuse */
	SVC_RANGES = 32,      /* only clients in mst_sources may use it */
	SVC_MAGLEV = 64,      /* the slots are a Maglev table: picked by hash, not at random */
	SVC_KEEP_SOURCE = 128, /* a client from outside keeps its address */
};

/* Numbers of state.FrontendKind. */
enum frontend_kind {
	KIND_CLUSTER_IP = 0,
	KIND_NODE_PORT = 1,
	KIND_EXTERNAL_IP = 2,
	KIND_LOAD_BALANCER = 3,
};

struct service {
	__u32 id;       /* of the backend slots */
	__u32 backends; /* slots 0 .. backends-1 are filled */
	__u16 flags;    /* enum service_flag */
	__u8 owner;     /* enum owner */
	__u8 kind;      /* enum frontend_kind */
	__u32 number;   /* what `svc ls` shows as id; stays when backends change */
	__u64 group;    /* shared by all frontends of a Service's port: affinity and sources are kept under it */
	__u32 affinity; /* seconds for which a client keeps its backend; 0: not at all */
	__u32 pad;
};
_Static_assert(sizeof(struct service) == 32, "service");

/* Set in struct slot_key.slot: the rest is the id of a backend that the Service has. Only
 * Services with affinity have such entries; backend ids stay below it. */
#define SLOT_MEMBER 2147483648

/* Who a client was led to, for as long as its affinity lasts. */
struct affinity_key {
	struct addr client; /* zero: the node itself */
	__u64 group;        /* struct service.group */
};
struct affinity {
	__u32 backend; /* id */
	__u32 expires; /* CLOCK_MONOTONIC in units of 2^30 ns */
};

/* A range of clients that may use a group's frontends. The bits that count begin at pad. */
struct source_key {
	__u32 prefixlen;
	__u32 pad;
	__u64 group; /* struct service.group */
	struct addr addr;
};
_Static_assert(sizeof(struct source_key) == 32, "source_key");

struct slot_key {
	__u32 service; /* struct service.id */
	__u32 slot;
};

struct backend {
	struct addr addr;
	__be16 port;
	__u8 proto;
	__u8 flags;
	__u32 pad;
};
_Static_assert(sizeof(struct backend) == 24, "backend");

/* Ids that no backend has. */
enum backend_id {
	BACKEND_NONE = 0,
	BACKEND_LEFT = 0xffffffff, /* of a half-open flow: it left the Service, so the next SYN picks another */
};

/* ---- Services at the socket ------------------------------------------- */

/* What a connected socket was told, and where it really goes. Lives with the socket. */
struct sock_peer {
	struct addr frontend;
	struct addr backend_addr;
	__be16 frontend_port;
	__be16 backend_port;
	__u32 backend; /* id */
	__u32 service; /* struct service.number */
	__u32 tables;  /* tables_generation(), where nobody clears what departs: the choice holds while it is the same; else 0 */
};
_Static_assert(sizeof(struct sock_peer) == 48, "sock_peer");

/* The same in a slot by the socket's cookie, while no other socket that is open has it: connect() then allocates
 * nothing. Of an unconnected UDP socket it is the first Service that it asked. */
#define SOCK_SLOTS 8192
struct sock_slot {
	__u64 cookie; /* 0: free */
	__u64 netns_cookie;
	struct sock_peer peer;
};
_Static_assert(sizeof(struct sock_slot) == 64, "sock_slot");
#define SOCK_SLOT_TAKEN (~0ull) /* somebody writes it */

/* A socket of mst_sock_peers as the iterator writes it: enough to name it to sock_diag(7). */
struct sock_seen {
	__u64 netns_cookie;
	__u64 cookie;
	struct addr local;
	struct addr remote; /* where it is connected now */
	__be16 local_port;
	__be16 remote_port;
	__u32 bound_if;
	__u16 family;
	__u8 proto;
	__u8 pad[5];
	struct sock_peer peer;
};
_Static_assert(sizeof(struct sock_seen) == 112, "sock_seen");

/* UDP. Unconnected: which backend a socket's datagrams to an address go to, and the way back, of the Services that it
 * asked after its first. Connected, and without a slot: the frontend that it was led away from, for who finds it by socket
 * diagnosis, which does not tell what is stored with a UDP socket. */
enum sock_flow_kind {
	SOCK_FLOW_THERE = 0,     /* addr is the frontend */
	SOCK_FLOW_BACK = 1,      /* addr is the backend */
	SOCK_FLOW_CONNECTED = 2, /* addr is the backend */
};
struct sock_flow_key {
	__u64 cookie;
	struct addr addr;
	__be16 port;
	__u8 kind; /* enum sock_flow_kind */
	__u8 pad[5];
};
struct sock_flow {
	struct addr addr;
	__be16 port;
	__u16 pad;
	__u32 backend;
};
