//! The decisions of an alias's policy and its shadow, with and without files.

use ::routing::policy::PolicyFile;
use sched::route::{Dqn, Features, Measure, Mlp, Random, RoutingPolicy, Tensor, Thresholds};

use super::*;

/// A folder for files of policies, removed when dropped.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = Self(std::env::temp_dir().join(format!("paced-routes-{}-{name}", std::process::id())));
        std::fs::create_dir_all(&folder.0).unwrap();
        folder
    }

    fn write(&self, name: &str, bytes: &[u8]) -> Routing {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        Routing::File(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Thresholds for models in this order. The large model has these limits in the classes `urgent` and `others`, the small model none.
fn thresholds(models: [&str; 2], limits: [f64; 2]) -> PolicyFile {
    let mut of = Thresholds::uniform(Measure::Predicted, 2, 2, 1e6);
    of.overload = 4.0;
    let at = 2 * models.iter().position(|model| *model == "large").unwrap();
    of.limits[at..at + 2].copy_from_slice(&limits);
    PolicyFile {
        models: models.map(str::to_owned).to_vec(),
        classes: vec!["urgent".into(), "others".into()],
        policy: RoutingPolicy::Thresholds(of),
    }
}

/// Teaches the costs of both engines: 10 ms per token for the large one.
fn teach(routes: &Routes) {
    let curve = |model| Curve::new(Cost { gpu_ns: if model == 0 { 1e7 } else { 2e6 }, ..Cost::default() });
    routes.recall(None, |model, _| Some(curve(model)));
}

#[test]
fn thresholds_of_a_file_decide_by_class_for_every_order_of_their_models() {
    let folder = Folder::new("thresholds");
    for models in [["large", "small"], ["small", "large"]] {
        let file = folder.write("a.toml", &thresholds(models, [0.1, 0.9]).to_bytes("").unwrap());
        let (routes, _) = routes_of(&settings(file, None), 8);
        teach(&routes);
        // The large model needs 200 ms of the 1 s for 20 tokens.
        let choose = |class| {
            let asked = RouteQuery { class, ..either(&[0, 1]) };
            let route = routes.route(asked, &wanted(Some(1_000)), ClientPath::default()).unwrap();
            (route.model, route.reason, route.by.map(|by| by.policy))
        };
        assert_eq!(choose("urgent"), (1, "threshold", Some("thresholds")), "{models:?}");
        assert_eq!(choose("others"), (0, "threshold", Some("thresholds")));
        assert_eq!(choose("unknown"), choose("others"), "as the last class");
    }
}

#[test]
fn a_file_does_not_decide_while_an_engine_has_ceased_to_report_its_load() {
    let folder = Folder::new("stale");
    let file = folder.write("a.toml", &thresholds(["large", "small"], [0.9; 2]).to_bytes("").unwrap());
    for report_ms in [300, 6_000] {
        let settings = GatewaySettings { decisions_bytes: 1 << 20, ..settings(file.clone(), None) };
        let (routes, engines) = routes_of(&settings, 8);
        teach(&routes);
        pass(2_000);
        engines[1].expect(false, report_ms * NS_PER_MS);
        let decide = || {
            let route = routes.route(either(&[0, 1]), &wanted(Some(1_000)), ClientPath::default()).unwrap();
            let stale = route.decision.unwrap().engines.iter().map(|engine| engine.is_stale).collect::<Vec<_>>();
            (route.reason, routes.tallies()[0].fell_back, stale)
        };
        assert_eq!(decide(), ("threshold", 0, vec![false; 2]), "it has never reported");
        engines[1].report(0, Reported::default(), 0);
        pass(report_ms);
        assert_eq!(decide(), ("threshold", 0, vec![false; 2]));
        pass(1);
        assert_eq!(decide(), ("fallback", 1, vec![false, true]), "{report_ms} ms");
        engines[1].report(0, Reported::default(), 0);
        assert_eq!(decide(), ("threshold", 1, vec![false; 2]));
    }
}

#[test]
fn an_engine_of_a_model_that_is_not_the_aliass_may_cease_to_report() {
    let folder = Folder::new("other");
    let file = folder.write("a.toml", &thresholds(["large", "small"], [0.9; 2]).to_bytes("").unwrap());
    let mut settings = settings(file, None);
    settings.models.push(model("other", 80, None));
    let engines: Vec<_> = (0..3).map(|_| Engines::new(1, 8, 8, Discipline::Fcfs, now_ns)).collect();
    let routes = Routes::new(&settings, &AliasPolicies::read(&settings).unwrap(), engines.clone(), now_ns);
    teach(&routes);
    pass(2_000);
    engines[2].expect(false, 300 * NS_PER_MS);
    engines[2].report(0, Reported::default(), 0);
    pass(2_000);
    assert_eq!(engines[2].others(), [None]);
    let route = routes.route(either(&[0, 1]), &wanted(Some(1_000)), ClientPath::default()).unwrap();
    assert_eq!((route.reason, routes.tallies()[0].fell_back), ("threshold", 0));
}

#[test]
fn no_file_makes_a_request_late_while_another_model_is_in_time() {
    let folder = Folder::new("guard");
    let file = folder.write("a.toml", &thresholds(["large", "small"], [1e6; 2]).to_bytes("").unwrap());
    let (routes, _) = routes_of(&settings(file, None), 8);
    teach(&routes);
    let choose = |budget_ms| routes.route(either(&[0, 1]), &wanted(Some(budget_ms)), ClientPath::default()).unwrap();
    assert_eq!((choose(300).model, choose(300).reason), (0, "threshold"));
    assert_eq!((choose(100).model, choose(100).reason), (1, "guard"), "the large one takes 200 ms");
    assert_eq!(routes.tallies()[0], Tally { decided: 4, guarded: 2, ..Tally::default() });
}

#[test]
fn a_network_whose_values_are_no_numbers_leaves_decisions_to_the_rule() {
    let folder = Folder::new("network");
    let network = |weight: f32| {
        let models = ["large", "small"].map(str::to_owned).to_vec();
        let file = PolicyFile { models, classes: vec!["default".into()], policy: RoutingPolicy::RoundRobin };
        let features = Features::Predictions;
        let zeros = Mlp::random(&[features.len(2, 1), 4, 2], &mut Random::new(1));
        let filled: Vec<_> =
            zeros.tensors().iter().map(|of| (of.name.clone(), of.shape.clone(), vec![weight; of.data.len()])).collect();
        let tensors: Vec<_> = filled
            .iter()
            .map(|(name, shape, data)| Tensor { name: name.clone(), shape: shape.clone(), data })
            .collect();
        let network = Mlp::from_tensors(&tensors).unwrap();
        let dqn = Dqn::new(network, features, &file.router_models(|_, _| 1.0), 1);
        PolicyFile { policy: RoutingPolicy::Dqn(dqn), ..file }.to_bytes("").unwrap()
    };
    let decide = |weight| {
        let (routes, _) = routes_of(&settings(folder.write("a.safetensors", &network(weight)), None), 8);
        teach(&routes);
        let route = routes.route(either(&[0, 1]), &wanted(Some(1_000)), ClientPath::default()).unwrap();
        (route.model, route.reason, routes.tallies()[0].fell_back)
    };
    assert_eq!(decide(0.0), (0, "value", 0));
    assert_eq!(decide(f32::MAX), (0, "fallback", 1));
}

#[test]
fn round_robin_and_least_loaded_place_requests_without_limits_as_well() {
    let models = |routes: &Routes, budget_ms| -> Vec<usize> {
        let choose = || routes.route(either(&[0, 1]), &wanted(budget_ms), ClientPath::default()).unwrap().model;
        (0..4).map(|_| choose()).collect()
    };
    let (routes, engines) = routes_of(&settings(Routing::RoundRobin, None), 8);
    for budget_ms in [None, Some(9_000)] {
        assert_eq!(models(&routes, budget_ms), [0, 1, 0, 1], "{budget_ms:?}");
    }
    drop(engines);
    let (routes, engines) = routes_of(&settings(Routing::LeastLoaded, None), 8);
    let _busy = take(&engines[0]);
    assert_eq!(models(&routes, None), [1; 4]);
    let (routes, engines) = routes_of(&settings(Routing::Rule, None), 8);
    let _busy = take(&engines[0]);
    assert_eq!(models(&routes, None), [0; 4], "the rule keeps the best model as long as it has room");
}

#[test]
fn a_shadow_is_asked_and_counted_and_never_obeyed() {
    let (routes, _) = routes_of(&settings(Routing::Rule, Some(Routing::RoundRobin)), 8);
    teach(&routes);
    let shadows: Vec<_> = (0..4)
        .map(|_| {
            let route = routes.route(either(&[0, 1]), &wanted(Some(9_000)), ClientPath::default()).unwrap();
            assert_eq!(route.model, 0);
            route.by.unwrap().shadow.unwrap()
        })
        .collect();
    assert!(shadows.iter().all(|shadow| shadow.policy == "round_robin"));
    assert_eq!(shadows.iter().map(|shadow| shadow.model).collect::<Vec<_>>(), [Some(0), Some(1), Some(0), Some(1)]);
    assert_eq!(routes.tallies()[0], Tally { decided: 4, shadowed: 4, agreed: 2, ..Tally::default() });
    routes.route(named(&[1]), &wanted(Some(9_000)), ClientPath::default()).unwrap();
    assert_eq!(routes.tallies()[0].decided, 4, "a request that names its model asks no policy");
}

#[test]
fn a_file_that_is_damaged_or_for_other_models_is_refused_with_its_name_and_its_alias() {
    let folder = Folder::new("refused");
    let refused = |name: &str, bytes: &[u8]| {
        let file = folder.write(name, bytes);
        let error = |settings| format!("{:#}", AliasPolicies::read(&settings).unwrap_err());
        let said = error(settings(file.clone(), None));
        assert!(said.contains(name) && said.contains("auto"), "{said}");
        assert_eq!(error(settings(Routing::Rule, Some(file))), said, "a shadow as well");
        said
    };
    let good = thresholds(["large", "small"], [0.5; 2]).to_bytes("").unwrap();
    let text = String::from_utf8(good).unwrap();
    assert!(refused("a.toml", text.replace("large", "huge").as_bytes()).contains("it does not know the model large"));
    assert!(refused("b.toml", b"kind = 1").contains("kind"));
    assert!(refused("c.toml", &[0xff; 9]).contains("neither"));
    let none = settings(Routing::File(folder.0.join("none.toml")), None);
    assert!(format!("{:#}", AliasPolicies::read(&none).unwrap_err()).contains("none.toml"));
}

#[test]
fn a_policy_that_counts_the_prompts_of_engines_counts_those_that_it_did_not_decide_about() {
    for shadow in [None, Some(Routing::Considerate)] {
        let mut settings = settings(Routing::Considerate, shadow);
        settings.aliases.push(Alias {
            name: "other".into(),
            policy: Routing::Rule,
            shadow: None,
            ..settings.aliases[0].clone()
        });
        let other = RouteQuery { alias: Some(1), ..either(&[0, 1]) };
        for (asked, limit_ms) in [(named(&[0]), None), (either(&[0, 1]), None), (other, Some(60_000))] {
            let (routes, _) = routes_of(&settings, 8);
            let curve = Curve::new(Cost { gpu_ns: 1e7, prefill_per_token_ns: 1e7, ..Cost::default() });
            routes.recall(None, |_, _| Some(curve));
            let decide = || routes.route(either(&[0, 1]), &wanted(Some(60_000)), ClientPath::default()).unwrap();
            let before = decide();
            let route = routes.route(asked, &wanted(limit_ms), ClientPath::default()).unwrap();
            assert_eq!(route.model, before.model);
            drop(routes.begin(&route, 0));
            let after = decide();
            assert!(after.predicted() > before.predicted(), "{asked:?}: its prompt took a second of the last ten");
            let Tally { shadowed, agreed, .. } = routes.tallies()[0];
            assert_eq!(shadowed, agreed);
        }
    }
}

#[test]
fn an_alias_counts_its_decisions_over_reloads_also_those_of_gateways_before_them() {
    let mut settings = settings(Routing::Rule, Some(Routing::Rule));
    let (before, _) = routes_of(&settings, 8);
    let decide = |routes: &Routes, alias| {
        let asked = RouteQuery { alias: Some(alias), ..either(&[0, 1]) };
        routes.route(asked, &wanted(Some(60_000)), ClientPath::default()).unwrap();
    };
    (0..3).for_each(|_| decide(&before, 0));
    let known = settings.aliases.clone();
    settings.aliases.insert(0, Alias { name: "new".into(), ..known[0].clone() });
    let (after, _) = routes_of(&settings, 8);
    let read = |aliases: &[Alias]| {
        AliasPolicies::read(&GatewaySettings { aliases: aliases.to_vec(), ..settings.clone() }).unwrap()
    };
    let share = |with: &Routes, policies: &AliasPolicies| {
        with.share_tallies((&settings.aliases, policies), (&before, &known, &read(&known)));
    };
    share(&after, &read(&settings.aliases));
    [0, 1].into_iter().for_each(|alias| decide(&after, alias));
    decide(&before, 0);
    let counts = |routes: &Routes| {
        let tallies = routes.tallies().into_iter();
        tallies.map(|Tally { decided, shadowed, agreed, .. }| (decided, shadowed, agreed)).collect::<Vec<_>>()
    };
    assert_eq!((counts(&before), counts(&after)), (vec![(5, 5, 5)], vec![(1, 1, 1), (5, 5, 5)]));
    let (other, _) = routes_of(&settings, 8);
    let shadow = Some(Routing::RoundRobin);
    share(&other, &read(&[&settings.aliases[..1], &[Alias { shadow, ..known[0].clone() }]].concat()));
    assert_eq!(counts(&other), [(0, 0, 0); 2], "those of another shadow say nothing about this one");
}

#[test]
fn a_prediction_includes_the_time_for_which_an_engine_refuses_requests() {
    let (routes, engines) = routes(1);
    let curve = Curve::new(Cost { gpu_ns: 1e7, ..Cost::default() });
    routes.recall(None, |_, _| Some(curve));
    engines[0].refused(0, Some(5_000 * NS_PER_MS));
    let decide = |asked| routes.route(asked, &wanted(Some(2_000)), ClientPath::default()).unwrap();
    let named = decide(named(&[0]));
    assert_eq!((named.predicted().unwrap().as_millis(), named.is_late()), (5_190, true));
    assert_eq!((routes.is_idle(&named), routes.opens_in_s(&named)), (false, 5), "it shows nothing of its speed");
    assert_eq!((decide(either(&[0, 1])).model, decide(either(&[0])).model), (1, 0));
    let unlimited = || routes.route(either(&[0, 1]), &wanted(None), ClientPath::default()).unwrap().model;
    assert_eq!(unlimited(), 1);
    let full = engines[1].take(Service::default(), &[]);
    assert_eq!(unlimited(), 1, "it takes requests again as soon as it has answered");
    drop(full);
    let mut tried = decide(either(&[1]));
    tried.model = 0;
    routes.moved(&mut tried, 0, true);
    assert_eq!(tried.predicted().unwrap().as_millis(), 190, "the engine has it already");
    pass(4_500);
    assert_eq!((routes.opens_in_s(&named), unlimited()), (1, 1));
    pass(500);
    assert_eq!((routes.is_idle(&named), decide(either(&[0, 1])).model, unlimited()), (true, 0, 0));
}
