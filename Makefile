# SPDX-License-Identifier: Apache-2.0

.PHONY: generate
generate: ## Compile bpf/ and renew Go's view of it (clang-16, libbpf headers)
	go generate ./internal/datapath/bpfgen
