//! Links: one trait family and its implementations (tcp, local, chaos).
