"""Fashion-MNIST, split by Dirichlet over the classes."""
