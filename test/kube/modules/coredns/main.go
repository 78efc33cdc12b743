// SPDX-License-Identifier: Apache-2.0

// Command coredns is CoreDNS with the plugins that a test cluster's Corefile
// names, and no others: a third of the usual size.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
)

// A query passes the plugins in this order, whatever the Corefile's is.
func init() {
	dnsserver.Directives = []string{
		"reload", "health", "ready", "errors", "log", "cache",
		"loadbalance", "hosts", "kubernetes", "forward",
	}
}

func main() { coremain.Run() }
