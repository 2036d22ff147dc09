//! What the service manager gives the daemon, and what it wants to hear: sockets that it opened, and that threads still move packets.

pub mod activation;
pub mod watchdog;
