// Command trivy reports what `trivy config FOLDER` finds in Kubernetes manifests (*.yaml) and
// Dockerfiles (*.Dockerfile). It uses only trivy's scanners and their embedded checks; the rest of
// trivy, for images, clouds and vulnerabilities, has four times as many packages.
//
// In: a folder. Out: the checks that failed, as a JSON array.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path"

	"github.com/aquasecurity/trivy/pkg/iac/rego"
	"github.com/aquasecurity/trivy/pkg/iac/scan"
	"github.com/aquasecurity/trivy/pkg/iac/scanners/dockerfile"
	"github.com/aquasecurity/trivy/pkg/iac/scanners/kubernetes"
	"github.com/aquasecurity/trivy/pkg/iac/scanners/options"
)

type scanner interface {
	ScanFS(context.Context, fs.FS, string) (scan.Results, error)
}

type finding struct {
	Check   string `json:"check"`
	File    string `json:"file"`
	Message string `json:"message"`
}

func main() {
	found, err := find(os.DirFS(os.Args[1]))
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(found)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func find(folder fs.FS) ([]finding, error) {
	checks := []options.ScannerOption{
		rego.WithEmbeddedPolicies(true),
		rego.WithEmbeddedLibraries(true),
	}
	scanners := map[string]scanner{
		".yaml":       kubernetes.NewScanner(checks...),
		".Dockerfile": dockerfile.NewScanner(checks...),
	}
	found := []finding{}
	err := fs.WalkDir(folder, ".", func(file string, _ fs.DirEntry, err error) error {
		one := scanners[path.Ext(file)]
		if err != nil || one == nil {
			return err
		}
		results, err := one.ScanFS(context.Background(), folder, file)
		for _, result := range results.GetFailed() {
			found = append(found, finding{result.Rule().ID, file, result.Description()})
		}
		return err
	})
	return found, err
}
