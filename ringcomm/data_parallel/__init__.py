"""Training on the primitives: one flat layout under data parallel and every ZeRO stage. Public names are in
`ringcomm`."""
