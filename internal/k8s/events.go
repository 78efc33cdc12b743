// SPDX-License-Identifier: Apache-2.0

package k8s

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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

// How long an event's message and its name may be (the API's limits).
const (
	longest     = 1024
	longestName = 253
)

// apiVersions are those of the kinds that have problems.
var apiVersions = map[Kind]string{Services: "v1", Policies: "networking.k8s.io/v1"}

// Warn writes a warning about an object. What has been said of it already, while
// the API server remembers, is not said again.
func (e *Events) Warn(ctx context.Context, kind Kind, object Key, uid, sentence string) error {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	now := metav1.Now()
	event := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: object.Namespace, Name: e.name(object, uid, sentence)},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: apiVersions[kind], Kind: string(kind), Namespace: object.Namespace, Name: object.Name,
			UID: types.UID(uid), // kubectl describe asks by it
		},
		Reason: "NotInForce", Type: corev1.EventTypeWarning, Message: cut(sentence),
		Source:         corev1.EventSource{Component: "mustang-agent", Host: e.node},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
		ReportingController: "mustang.net/agent", ReportingInstance: e.node,
	}
	err := e.c.core.Post().Namespace(object.Namespace).Resource("events").Body(event).Do(ctx).Error()
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// name follows from what an event says: an agent that has restarted asks for the
// same one, which is there already. So the right to create is enough.
func (e *Events) name(object Key, uid, sentence string) string {
	sum := sha256.Sum256([]byte(uid + "\n" + e.node + "\n" + sentence))
	end := "." + hex.EncodeToString(sum[:8])
	start := object.Name[:min(len(object.Name), longestName-len(end))]
	return strings.TrimRight(start, ".-") + end // a part of a name ends in a letter or a digit
}

// cut makes a sentence fit without leaving half a character: the API's encoding
// takes UTF-8 alone.
func cut(sentence string) string {
	return strings.ToValidUTF8(sentence[:min(len(sentence), longest)], "")
}
