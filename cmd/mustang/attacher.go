// SPDX-License-Identifier: Apache-2.0

package main

// What `pod` needs of the engine.

import (
	"context"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/state"
)

func init() {
	openAttacher = func(ctx context.Context, g *globals) (endpointAttacher, error) {
		e, err := g.open(ctx, false)
		if err != nil {
			return nil, err
		}
		return engineAttacher{e}, nil
	}
}

type engineAttacher struct{ *engine.Engine }

// Close leaves no scope that was made for nothing.
func (a engineAttacher) Close() error { return a.Abandon() }

func (a engineAttacher) AddEndpoint(ctx context.Context, made state.Endpoint, pod podSpec) (uint32, error) {
	ep, err := a.Engine.AddEndpoint(ctx, engine.EndpointSpec{Owner: state.OwnerCLI, ServicePath: pod.servicePath, Made: &made,
		Labels: pod.labels, Ports: pod.ports, Pod: pod.ref, Masquerade: pod.masquerade})
	if err != nil {
		return 0, err
	}
	return ep.ID, nil
}

func (a engineAttacher) RemoveEndpoint(_ context.Context, id uint32, netnsPath, ifname string) error {
	return a.RemoveAt(engine.Whereabouts{ID: id, Netns: netnsPath, IfName: ifname, Owner: state.OwnerCLI})
}
