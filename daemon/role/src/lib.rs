//! The common parts of the relay role and the edge role: tunnels, their traffic, tables of open ones, and the acceptance
//! of callers.

pub mod accept;
pub mod access;
pub mod account;
pub mod admitted;
pub mod bind_error;
pub mod classes;
pub mod door;
pub mod expiry;
pub mod gate;
pub mod holder;
pub mod journal;
pub mod kept;
pub mod labelled;
pub mod limits;
pub mod month;
pub mod own_sockets;
pub mod ready;
pub mod seldom;
pub mod table;
pub mod tcp;
pub mod traffic;
pub mod transport;
pub mod tunnel;
pub mod user_labels;
pub mod verbosity;
