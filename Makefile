# SPDX-License-Identifier: Apache-2.0
# What a person types. `make demo` and `make test` work on a fresh machine, as root.

SHELL := /bin/bash
GO    ?= go
BIN   := bin/mustang

# Where go.dev's instructions put Go; sudo's own PATH lacks it.
export PATH := $(PATH):/usr/local/go/bin

.PHONY: all
all: build

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/' | expand -t 16

.PHONY: build
build: ## the tool and the CNI plugin, into bin/
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(dir $(BIN)) ./cmd/mustang ./cmd/mustang-cni

.PHONY: deps
deps: ## Debian packages that the demo runs
	@scripts/deps run

.PHONY: test-deps
test-deps: ## Debian packages that the tests run
	@scripts/deps test

.PHONY: demo
demo: deps build ## pods, Services, a short bench, its table; then everything is gone again
	@scripts/demo $(BIN)

VERSION := $(shell sed -n 's/^appVersion: //p' deploy/chart/mustang/Chart.yaml)

.PHONY: image
image: ## the container image, into bin/image/: one archive for amd64, one for arm64
	cd deploy/tools && $(GO) run ./image --version $(VERSION) --out ../../bin/image

.PHONY: manifests
manifests: ## deploy/*.yaml from the chart
	cd deploy/tools && $(GO) run ./manifest --write

.PHONY: cluster
cluster: test-deps ## a two-node Kubernetes on this machine with mustang installed (SET="agent.node-mode=vxlan" …)
	@scripts/cluster up

.PHONY: cluster-down
cluster-down: ## remove it
	@scripts/cluster down

.PHONY: e2e
e2e: ## upstream's network specs against that cluster (FOCUS='\[Conformance\]' …); docs/e2e.md says what is skipped, and why
	@scripts/e2e

.PHONY: storm
storm: test-deps ## nginx, redis, postgres, DNS while agents, kubelets, API server, a node and 500 pods come and go: mustang, then kube-proxy + bridge (20 min)
	@scripts/deps storm
	@test/kube/kube build
	MUSTANG_CLUSTER=1 MUSTANG_STORM=long $(GO) test ./test/kube -run TestStorm -v -count 1 -timeout 40m

.PHONY: test-cluster
test-cluster: test-deps ## all of test/kube: Conformance, the README's commands, Helm, migration, a short storm, each on a cluster of its own; image, alerts, dashboard (40 min)
	@scripts/deps storm
	@test/kube/kube build --e2e
	cd deploy/tools && $(GO) test -timeout 30m ./...
	MUSTANG_CLUSTER=1 $(GO) test ./test/kube -v -count 1 -timeout 90m

.PHONY: connectivity
connectivity: build ## who reaches whom on that cluster, in a table
	KUBECONFIG=/var/lib/mustang-kube/mustang/kubeconfig $(BIN) connectivity test

.PHONY: generate
generate: ## recompile the BPF programs and what is generated from them
	$(GO) generate ./internal/...

# Without what a debugger reads, test binaries are linked in three quarters of the time.
TEST := $(GO) test -ldflags=-s

# Whole nodes, pods and plugins: minutes of real packets, and of waits.
SLOW_TESTS := /(test/(cni|nodes|service)|internal/(engine|observe))$$

.PHONY: check
check: test-deps ## quick: formatting, vet, generated code, unit tests, packets through the programs
	@scripts/check-format
	$(GO) vet ./...
	@scripts/check-generated
	$(TEST) -short $$($(GO) list ./... | grep -vE '$(SLOW_TESTS)')

.PHONY: test
test: test-deps ## everything, on this kernel; on 6.1 and 6.12, that programs load, attach and cost what they did
	@$(MAKE) --no-print-directory -j3 IN_ORDER=1 test-kube vm-idle path-idle

# The cluster's tests wait for others, and the others' waits would be over beside a cluster: so one comes after the
# other. Beside both goes what takes but what they leave of the processors: Kubernetes is built, then instructions are
# counted, whatever time that takes. The guests that run tests come later: with less of the processors they would wait
# for longer than their tests do.
ifdef IN_ORDER
test-kube: | check-page kube-built
check-page: | test-go
path-idle: | kube-built
vm-idle: | test-go kube-built
endif

KUBE_TESTS := ./test/agent ./test/kube

# Those that take longest begin first: two run at once, and neither is to be alone at the end.
LONG_TESTS := ./test/nodes ./test/cni ./internal/datapath/dptest ./internal/engine ./test/service

# The compiler's memory lies the other way around here than where its output was committed: whatever depends on its
# addresses, as BTF once did, shows at once, and not first on a machine with other paths.
.PHONY: test-go
test-go: test-deps
	@scripts/check-format
	$(GO) vet ./...
	@MALLOC_MMAP_THRESHOLD_=0 MALLOC_MMAP_MAX_=1000000 scripts/check-generated
	$(TEST) -timeout 30m $(LONG_TESTS) $$($(GO) list ./... | grep -vE '/test/(agent|kube)$$')

# Kubernetes is built at the lowest priority while the others' tests wait. `make test` is to take 40 minutes at
# most, and what comes after it 20: what is not built after 18 is left out.
.PHONY: kube-built
kube-built: test-deps
	test/kube/kube build --e2e --within $(or $(KUBE_BUILD),18m)

.PHONY: test-kube
test-kube: test-deps ## the agent beside an API server, clusters with mustang, upstream's Conformance; needs test/kube/kube build --e2e
	$(TEST) -p 1 -count 1 -timeout 30m $(KUBE_TESTS)

.PHONY: check-page
check-page: ## the bench's page in headless Chromium: desktop and phone, light and dark, by keyboard
	@scripts/deps page
	cd test/page && $(GO) test -count 1 ./... # the page is not of its module

# The kernel whose instructions are recorded, and how it is reached.
VM_KERNEL := 6.12
RECORD    := bench/path/record.json
VM_MODES  ?= veth,bridge,bridge-nf-off,macvlan,ipvlan,ipvlan-l3,netkit,netkit-l3
VM_BY     ?= iptables-nft,mustang-tc

# Of the record, what every change is held to: the programs at the host's end, and a whole transaction.
PATH_CI   := --hooks veth,netkit --modes veth --pairs veth --services-by mustang-tc --rounds 5

.PHONY: check-path
check-path: build ## instructions of packets and transactions, in the VM, held to the record (UPDATE=1 renews it)
	@test/vm/fetch $(VM_KERNEL) >/dev/null
	test/vm/bench $(VM_KERNEL) path $(if $(UPDATE),--update,--check) $(RECORD)

.PHONY: check-path-ci
check-path-ci: build ## of these, what every change is held to (10 min idle)
	@test/vm/fetch $(VM_KERNEL) >/dev/null
	test/vm/bench --timeout 3600 $(VM_KERNEL) path $(PATH_CI) --check $(RECORD)

.PHONY: bench-path
bench-path: build ## nanoseconds of packets at each hook, on this machine
	$(BIN) bench path

.PHONY: bench-vm
bench-vm: build ## the short bench in the VM, all modes, by instructions: emulated
	@test/vm/fetch $(VM_KERNEL) >/dev/null
	test/vm/bench $(VM_KERNEL) samehost --modes $(VM_MODES) --services-by $(VM_BY) --json bench-vm.json

.PHONY: test-vm
test-vm: test-deps ## other kernels: every mode that each has, under emulation (an hour a kernel)
	@test/vm/suite 6.1 6.12 newest
	@$(MAKE) --no-print-directory test-vm-cni
	@$(MAKE) --no-print-directory test-vm-nodes

.PHONY: test-vm-cni
test-vm-cni: test-deps ## the CNI plugin's tests, all of them, in the modes that this kernel may lack (6.12, one guest)
	@test/vm/fetch 6.12
	@test/vm/cni 6.12 netkit netkit-l3 ipvlan ipvlan-l3

.PHONY: test-vm-nodes
test-vm-nodes: test-deps ## between nodes, what this kernel may lack: a wire that loses and reorders, VLANs, bonds (6.12)
	@test/vm/fetch 6.12
	@test/vm/nodes 6.12

# The modes that the machine at hand may lack, on the kernels that most people run.
VM_CI := test-vm-6.1 test-vm-6.12
test-vm-6.1:  SUITE := 6.1:ipvlan,ipvlan-l3
test-vm-6.12: SUITE := 6.12:netkit,netkit-l3

.PHONY: $(VM_CI)
$(VM_CI):
	@MUSTANG_TEST_PATHS=$${MUSTANG_TEST_PATHS:-mustang-tc,mustang} test/vm/suite --short $(SUITE)

.PHONY: test-vm-ci
test-vm-ci: test-deps $(VM_CI) ## of these, links, engine, and the table of the modes that this kernel may lack (10 min idle)

# What `make test` runs there: programs are loaded and attached on both kernels, and their instructions counted.
.PHONY: programs-6.1 programs-6.12
programs-6.1 programs-6.12: programs-%:
	@test/vm/suite --programs $*

.PHONY: vm-idle
vm-idle:
	@chrt --idle 0 $(MAKE) --no-print-directory vm-ci

# At once: a guest that waits (for what must not come) leaves the processors to the other.
.PHONY: vm-ci
vm-ci: build
	@test/vm/fetch 6.1 6.12
	@$(MAKE) --no-print-directory -j2 --output-sync=target programs-6.1 programs-6.12

# Emulation counts instructions, and does not mind to wait for a processor.
.PHONY: path-idle
path-idle:
	@chrt --idle 0 $(MAKE) --no-print-directory --output-sync=target check-path-ci
