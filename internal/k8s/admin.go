// SPDX-License-Identifier: Apache-2.0

package k8s

// What the tool does in a cluster for a person: read, make and delete objects,
// run commands in pods, read logs. Objects are JSON; the caller has their types.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"
)

// Admin acts with a person's rights.
type Admin struct {
	config *rest.Config
	rest   rest.Interface
}

// ConnectAdmin reads a kubeconfig: the one named, or else the one that kubectl
// would take, or a pod's service account.
func ConnectAdmin(kubeconfig string) (*Admin, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, errors.New("no kubeconfig says which cluster; name one by --kubeconfig or $KUBECONFIG")
	}
	if err != nil {
		return nil, fmt.Errorf("find the cluster: %w; name it by --kubeconfig or $KUBECONFIG", err)
	}
	config.QPS = -1
	config.UserAgent = "mustang"
	config.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	config.WarningHandler = rest.NoWarnings{}
	client, err := rest.UnversionedRESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("prepare the connection to the API server %s: %w", config.Host, err)
	}
	return &Admin{config: config, rest: client}, nil
}

// Server is the API server's address, for people.
func (a *Admin) Server() string { return a.config.Host }

// Get reads what is at a path of the API.
func (a *Admin) Get(ctx context.Context, path string, into any) error {
	text, err := a.rest.Get().RequestURI(path).Do(ctx).Raw()
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return json.Unmarshal(text, into)
}

// Raw reads what is at a path as it is.
func (a *Admin) Raw(ctx context.Context, path string) ([]byte, error) {
	text, err := a.rest.Get().RequestURI(path).Do(ctx).Raw()
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return text, nil
}

// Create makes an object in the collection at a path, and reads it back into
// object.
func (a *Admin) Create(ctx context.Context, path string, object any) error {
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	answer, err := a.rest.Post().AbsPath(path).SetHeader("Content-Type", runtime.ContentTypeJSON).Body(text).Do(ctx).Raw()
	if err != nil {
		return fmt.Errorf("make an object in %s: %w", path, err)
	}
	return json.Unmarshal(answer, object)
}

// Delete removes what is at a path. What is not there is success.
func (a *Admin) Delete(ctx context.Context, path string) error {
	err := a.rest.Delete().AbsPath(path).Do(ctx).Error()
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s: %w", path, err)
	}
	return nil
}

// Exists says whether there is something at a path.
func (a *Admin) Exists(ctx context.Context, path string) (bool, error) {
	err := a.rest.Get().AbsPath(path).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// Exec runs a command in a pod's container. A status other than 0 is an
// ExitError with what the command said.
func (a *Admin) Exec(ctx context.Context, namespace, pod, container string, command ...string) ([]byte, error) {
	request := a.rest.Get().AbsPath("/api/v1/namespaces/"+namespace+"/pods/"+pod+"/exec").
		Param("container", container).Param("stdout", "true").Param("stderr", "true")
	for _, word := range command {
		request = request.Param("command", word)
	}
	e, err := remotecommand.NewWebSocketExecutor(a.config, "GET", request.URL().String())
	if err != nil {
		return nil, err
	}
	var out, said bytes.Buffer
	err = e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &out, Stderr: &said})
	var code exec.CodeExitError
	if errors.As(err, &code) {
		return out.Bytes(), ExitError{code.Code, said.String()}
	}
	if err != nil {
		return nil, fmt.Errorf("run a command in %s/%s: %w", namespace, pod, err)
	}
	return out.Bytes(), nil
}

// ExitError is a command in a pod that ended with a status other than 0.
type ExitError struct {
	Code int
	Said string
}

func (e ExitError) Error() string {
	if e.Said == "" {
		return fmt.Sprintf("it ended with status %d", e.Code)
	}
	return string(bytes.TrimSpace([]byte(e.Said)))
}

// Log copies a container's log.
func (a *Admin) Log(ctx context.Context, namespace, pod, container string, previous bool, to io.Writer) error {
	r, err := a.rest.Get().AbsPath("/api/v1/namespaces/"+namespace+"/pods/"+pod+"/log").
		Param("container", container).Param("previous", fmt.Sprint(previous)).Stream(ctx)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.Copy(to, r)
	return err
}
