//! The relay and the path that operators choose, whatever placements and the order of preference say.

use crate::line::Line;

/// What an operator's move chooses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OperatorChoice {
    /// A relay by its host and port, and the indices of the paths that lead to it.
    Relay { relay: String, paths: Vec<usize> },
    /// A path by its index.
    Path(usize),
}

impl OperatorChoice {
    /// Whether a connection over this path to this relay is one that the operator means.
    pub(crate) fn means(&self, path_place: usize, to: &str) -> bool {
        match self {
            Self::Relay { relay, .. } => relay == to,
            Self::Path(path) => *path == path_place,
        }
    }
}

/// The relay and the path that operators have chosen, which are used rather than others while they have room. The path counts more: it is
/// chosen to take traffic off an uplink.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Choices {
    /// The host and port of the relay.
    pub(crate) relay: Option<String>,
    /// The index of the path.
    pub(crate) path: Option<usize>,
}

impl Choices {
    /// Returns the choices after another one is made. If it is a relay, a chosen path that does not lead there is no longer chosen.
    pub(crate) fn with(&self, choice: &OperatorChoice) -> Self {
        match choice {
            OperatorChoice::Relay { relay, paths } => {
                Self { relay: Some(relay.clone()), path: self.path.filter(|path| paths.contains(path)) }
            }
            OperatorChoice::Path(path) => Self { path: Some(*path), ..self.clone() },
        }
    }

    /// Whether a connection leads to the chosen relay.
    pub(crate) fn has_relay_of(&self, line: &Line) -> bool {
        self.relay.as_ref().is_some_and(|relay| line.leads_to(relay))
    }

    /// Whether a connection leads over the chosen path.
    pub(crate) fn has_path_of(&self, line: &Line) -> bool {
        self.path == Some(line.path_place)
    }

    /// Returns the rank of a connection for a tunnel, lower first. The rank counts more than placements, which choose among the connections
    /// of the lowest rank. The chosen path comes first, then the chosen relay, and then, for a tunnel that leaves the connection `left`, the
    /// relay where it is. Such a tunnel has little time, so relays that have asked for no further requests come last for it.
    pub(crate) fn rank(&self, line: &Line, left: Option<&Line>) -> impl Ord + use<> {
        let stays = left.is_some_and(|left| left.is_continued_by(line));
        let is_put_off = left.is_some() && line.is_put_off();
        (is_put_off, !self.has_path_of(line), !self.has_relay_of(line), !stays)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relay_takes_the_place_of_a_chosen_path_only_if_that_does_not_lead_to_it() {
        let choice = |paths: &[usize]| OperatorChoice::Relay { relay: "a.example:443".to_owned(), paths: paths.into() };
        let on_second = Choices::default().with(&OperatorChoice::Path(1));
        assert_eq!(on_second, Choices { relay: None, path: Some(1) });
        let relay = Some("a.example:443".to_owned());
        assert_eq!(on_second.with(&choice(&[0, 1])), Choices { relay: relay.clone(), path: Some(1) });
        assert_eq!(on_second.with(&choice(&[0])), Choices { relay: relay.clone(), path: None });
        let at_relay = Choices { relay: relay.clone(), path: None };
        assert_eq!(at_relay.with(&OperatorChoice::Path(1)), Choices { relay, path: Some(1) });
    }
}
