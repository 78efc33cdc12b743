// SPDX-License-Identifier: Apache-2.0

// Package bpfgen holds what is generated from bpf/: the compiled programs,
// Go's view of the shared types, and the table of drop reasons. It is
// committed, so that building mustang takes Go alone; `make generate` renews
// it, and CI compares.
package bpfgen

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpfgen -type near_flow -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" Pod ../../../bpf/pod.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpfgen -no-global-types -type sock_flow_key -type sock_flow -type sock_peer -type sock_slot -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" Sock ../../../bpf/sock.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpfgen -no-global-types -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" Entry ../../../bpf/entry.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpfgen -no-global-types -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" Netdev ../../../bpf/netdev.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpfgen -no-global-types -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" Overlay ../../../bpf/overlay.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpfgen -no-global-types -type sock_seen -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" Iter ../../../bpf/iter.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpfgen -no-global-types -type parent -type child_key -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" Parent ../../../bpf/parent.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpfgen -no-global-types -type edge_config -target bpfel -cc clang-16 -cflags "-O2 -g -mcpu=v3 -Wall -Werror -I/usr/include/x86_64-linux-gnu" Edge ../../../bpf/edge.bpf.c
//go:generate go run ../cgen -o enums.go -reasons ../../../docs/reasons.md ../../../bpf/types.h ../../../bpf/service.h ../../../bpf/flow.h ../../../bpf/config.h ../../../bpf/reasons.h
//go:generate go run ../cgen -o objects.go -objects .
