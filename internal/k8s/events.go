// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Events tells on an object what is wrong with it.
type Events struct {
	c    *Client
	node string
}

// Events are written in the name of node's agent.
func (c *Client) Events(node string) *Events { return &Events{c, node} }

// eventTimeout bounds one event: it is told to people, and nothing waits for it.
const eventTimeout = 5 * time.Second

// longest is how long an event's message may be (the API's limit).
const longest = 1024

// apiVersions are those of the kinds that have problems.
var apiVersions = map[Kind]string{Services: "v1", Policies: "networking.k8s.io/v1"}

// Warn writes a warning about an object.
func (e *Events) Warn(ctx context.Context, kind Kind, object Key, sentence string) error {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	now := metav1.Now()
	event := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: object.Namespace, Name: fmt.Sprintf("%s.%s.%x", object.Name, e.node, now.UnixNano()),
		},
		InvolvedObject: corev1.ObjectReference{APIVersion: apiVersions[kind], Kind: string(kind), Namespace: object.Namespace, Name: object.Name},
		Reason:         "NotInForce", Type: corev1.EventTypeWarning, Message: sentence[:min(len(sentence), longest)],
		Source:         corev1.EventSource{Component: "mustang-agent", Host: e.node},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
		ReportingController: "mustang.net/agent", ReportingInstance: e.node,
	}
	return e.c.core.Post().Namespace(object.Namespace).Resource("events").Body(event).Do(ctx).Error()
}
