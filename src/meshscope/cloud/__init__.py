"""TPU slices of Google Cloud: quota, commands of gcloud, machines, Kubernetes manifests. Never run against the real cloud."""
