// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"

	"github.com/mustang-net/mustang/internal/cni"
	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/service"
)

// Agent is one node's agent. It holds the scope's lock from New to the end of
// Run.
type Agent struct {
	config Config
	log    *slog.Logger
	client *k8s.Client
	watch  *k8s.Watch

	// mu guards the engine, which is not for concurrent use.
	mu     sync.Mutex
	engine *engine.Engine

	metrics  *metrics
	checks   *healthChecks
	problems *problems
	policies *policies
	sync     *syncer
	command  Command
	kept     upkeep

	configChanged atomic.Bool // on disk, since the agent's start
}

// everything is what the agent follows.
var everything = []k8s.Kind{k8s.Services, k8s.Slices, k8s.Nodes, k8s.Pods, k8s.Namespaces, k8s.Policies}

// Command runs one call of the command line with the engine in the agent. rest does what is
// left, which needs no engine and may take long, and answers.
type Command func(ctx context.Context, e *engine.Engine, call Call) (rest func() Answer)

// New takes the node's scope and reads what is at work there. It does not wait
// for the API server. command answers the command line; the caller runs the
// agent, or closes it.
func New(ctx context.Context, config Config, log *slog.Logger, command Command) (*Agent, error) {
	if err := config.Check(); err != nil {
		return nil, err
	}
	client, err := k8s.Connect(config.access())
	if err != nil {
		return nil, err
	}
	e, err := engine.Open(ctx, config.scope(), engine.Options{
		Notify: func(s string) { log.Warn(s) }, Node: service.Node{Name: config.Node}, Fed: true,
	})
	if err != nil {
		return nil, err
	}
	return assemble(config, log, client, e, command), nil
}

// assemble puts an agent together.
func assemble(config Config, log *slog.Logger, client *k8s.Client, e *engine.Engine, command Command) *Agent {
	a := &Agent{config: config, log: log, client: client, engine: e, command: command}
	a.watch = client.NewWatch(log, everything...)
	a.metrics = newMetrics(a)
	// A node that is to go serves the endpoints that it still has.
	at, _ := config.prefixes() // checked at the start
	a.checks = newHealthChecks(log, at, func() bool { return len(a.works().Because) == 0 })
	a.problems = newProblems(log, a.uid, client.Events(config.Node).Warn)
	a.policies = newPolicies(a)
	a.sync = newSyncer(a)
	return a
}

// uid is of an object as it is now, "" when there is none.
func (a *Agent) uid(o object) string {
	switch o.kind {
	case k8s.Services:
		if s := a.watch.Services.Get(o.key); s != nil {
			return s.UID
		}
	case k8s.Policies:
		if p := a.watch.Policies.Get(o.key); p != nil {
			return p.UID
		}
	}
	return ""
}

// Close lets go of the scope. What is at work stays.
func (a *Agent) Close() error { return a.engine.Close() }

// with runs fn with the engine, while nobody else uses it. Whoever waits for
// longer than ctx does not get it.
func (a *Agent) with(ctx context.Context, fn func(*engine.Engine) error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	return fn(a.engine)
}

// anotherConfig is what is wrong then, and the mend.
const anotherConfig = "it has changed since the agent started, which goes on with what it read then: kubectl -n kube-system rollout restart ds/mustang"

// lookAtConfig says once when the configuration on disk is not the one in force any more: of a ConfigMap that
// changes, agents that run hear nothing, and those that happen to restart would be the only ones that follow it.
func (a *Agent) lookAtConfig() {
	changed := a.config.changed()
	if before := a.configChanged.Swap(changed); changed && !before {
		a.log.Warn("the configuration is not in force: "+anotherConfig, "file", a.config.file)
	}
}

// Run works until ctx ends or something that the agent cannot be without fails.
// The datapath stays as it is.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	start := func(what string, run func(context.Context) error) {
		wg.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				cancel(fmt.Errorf("%s: %w", what, err))
			}
		})
	}
	plugin, err := cni.Listen(a.config.StateDir)
	if err != nil {
		return errors.Join(err, a.Close())
	}
	tool, err := listenTool(a.config.StateDir)
	if err != nil {
		return errors.Join(err, plugin.Close(), a.Close())
	}
	start("serve the CNI plugin", func(ctx context.Context) error {
		defer os.Remove(cni.SocketPath(a.config.StateDir))
		s := cni.Server{Engine: a.with, Labels: a.policies.labels, Added: a.policies.added, Log: a.log, BPFFS: a.config.BPFFS}
		return s.Serve(ctx, plugin)
	})
	start("settle pods", a.settle)
	start("serve the command line", func(ctx context.Context) error { return a.serveTool(ctx, tool) })
	start("serve health", func(ctx context.Context) error { return a.serveHealth(ctx) })
	start("serve metrics", func(ctx context.Context) error { return a.serveMetrics(ctx) })
	start("follow the API server", func(ctx context.Context) error { a.watch.Run(ctx); return nil })
	start("apply changes", func(ctx context.Context) error { return a.sync.run(ctx) })
	start("follow this node's devices", a.followDevices)
	start("follow this node's addresses", func(ctx context.Context) error { return a.followAddresses(ctx) })
	start("tell problems", func(ctx context.Context) error { a.problems.run(ctx); return nil })
	a.log.Info("running", "node", a.config.Node, "api-server", a.client.Server, "bpffs", a.config.BPFFS, "state-dir", a.config.StateDir)
	<-ctx.Done()
	wg.Wait()
	a.checks.close()
	err = context.Cause(ctx)
	if errors.Is(err, context.Canceled) {
		a.log.Info("stopping; what is at work stays")
		err = nil
	}
	return errors.Join(err, a.Close())
}
