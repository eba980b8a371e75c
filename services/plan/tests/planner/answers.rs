//! Plans for machines whose costs are round numbers.

use std::cell::RefCell;
use std::sync::Arc;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::judge::Rule;
use triptych_bench::slo::Slo;
use triptych_bench::workload::Workload;
use triptych_plan::curves::sample::{Costs, curves_of, two_towers};
use triptych_plan::curves::{CostCurves, TowerCurves};
use triptych_plan::online::{Replicas, needed};
use triptych_plan::planner::search::settle;
use triptych_plan::planner::{
    Advice, Budget, CurveKind, Demand, Effort, Named, Phase, PlanError, Question, Recommendation, Residuals,
    Reused, SearchedCandidate, Shape, Step, expected, markdown, plan,
};
use triptych_plan::simulator::spec::{FrontCores, PromptSpec};
use triptych_plan::validation::candidate;

const EFFORT: Effort =
    Effort { requests: 100, seeds: 1, tolerance: 0.3, tunes: false, what_if: false, ..Effort::QUICK };

fn demand(workload: &str) -> Named {
    let workload = Workload::parse(workload).expect("a workload");
    Named { workload, arrivals: Arrivals::Poisson }
}

fn question<'a>(demand: &'a dyn Demand, costs: &Costs, budget: Budget) -> Question<'a> {
    Question {
        demand,
        slo: "ttft=2s,tpot=100ms".parse().expect("an SLO"),
        rule: Rule::default(),
        curves: vec![Arc::new(curves_of(costs))],
        budget,
        front: FrontCores::Own,
        shares_cores: false,
        prompt: PromptSpec::default(),
        effort: EFFORT,
        error: Residuals::default().error_for("any", CurveKind::Idle),
    }
}

fn answer(workload: &str, costs: &Costs, budget: Budget) -> Recommendation {
    let demand = demand(workload);
    plan(&question(&demand, costs, budget), &|_| {}).expect("a plan")
}

/// Encoders of the best cluster that has some apart, of so many workers, however it compares with those without.
fn encoders_of_best_split(answer: &Recommendation) -> usize {
    let split = answer.simulated.iter().find(|cluster| cluster.name.contains("pd ("));
    let name = &split.expect("some cluster has encoders apart").name;
    name.split('e').next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{name}"))
}

#[test]
fn text_alone_needs_no_encoders() {
    let answer = answer("text:text=100,output=12", &Costs::default(), Budget::Cores(4));
    assert_eq!(answer.advice, Advice::DoNotDisaggregate, "{}", answer.why);
    assert_eq!(answer.best.shape, Shape::Replicated { workers: 4 });
    assert!(answer.best.goodput.mean > 0.0);
    assert!(answer.why.contains("no items"), "{}", answer.why);
}

#[test]
fn a_model_without_an_encoder_has_no_clusters_with_encoders() {
    let mut curves = curves_of(&Costs::default());
    curves.encode.clear();
    curves.items.clear();
    curves.preprocess.clear();
    curves.check().expect("curves of a decoder by itself");
    let demand = demand("text:text=100,output=12");
    let plain = question(&demand, &Costs::default(), Budget::Cores(4));
    let answer = plan(&Question { curves: vec![Arc::new(curves)], ..plain }, &|_| {}).expect("a plan");
    assert_eq!(answer.best.shape, Shape::Replicated { workers: 4 });
    assert!(answer.simulated.iter().all(|cluster| !cluster.name.contains("pd (")), "{:?}", answer.why);
}

#[test]
fn dear_encodes_need_more_encoders_than_cheap_ones() {
    let cheap = answer(
        "epd-short:images=1,text=100,output=12",
        &Costs { encode_token: 20.0, ..Costs::default() },
        Budget::Cores(4),
    );
    let dear = answer(
        "epd-short:images=4,text=100,output=12",
        &Costs { encode_token: 800.0, ..Costs::default() },
        Budget::Cores(4),
    );
    let (few, many) = (encoders_of_best_split(&cheap), encoders_of_best_split(&dear));
    assert!(few < many, "{few} encoders where encoding is cheap, {many} where it is dear");
    assert_eq!(few, 1);
}

#[test]
fn the_answer_is_within_its_bound_and_its_runner_up_is_not_better() {
    let answer = answer("epd-short:images=2,text=100,output=12", &Costs::default(), Budget::Cores(4));
    let best = &answer.best;
    assert!(best.goodput.mean > 0.0 && best.goodput.mean <= best.bound.rate);
    assert!(best.goodput.low <= best.goodput.mean && best.goodput.mean <= best.goodput.high);
    if let Some(second) = &answer.runner_up {
        assert_ne!(second.shape, best.shape);
        // A simpler cluster may be chosen over one that is not told apart from it.
        assert!(!second.goodput.is_above(&best.goodput));
    }
    assert!(!best.bottleneck.pool.is_empty() && best.bottleneck.utilisation > 0.0);
}

#[test]
fn the_plan_tells_workers_the_slo() {
    let demand = demand("text:text=600,output=40");
    let effort = Effort { requests: 200, tolerance: 0.02, tunes: true, ..EFFORT };
    let topology = "colocated".parse().expect("a topology");
    // With the second a share of the time may serve as much.
    for (slo, least_gain, is_recommended) in
        [("ttft=1s,tpot=12ms", 1.1, true), ("ttft=60s,tpot=7ms", 0.9, false)]
    {
        let slo: Slo = slo.parse().expect("an SLO");
        let question = Question { slo, effort, ..question(&demand, &Costs::default(), Budget::Cores(1)) };
        let answer = plan(&question, &|_| {}).expect("a plan");
        if is_recommended {
            assert!(markdown(&answer).contains("| `--tpot-slo` | "), "{}", markdown(&answer));
            assert!(answer.best.commands[0].contains(" --tpot-slo "), "{:?}", answer.best.commands);
        }
        let [told, untold] = [Some(&slo), None].map(|told| {
            let cluster = candidate(&topology, &question.curves[0], told);
            expected(&question, cluster).expect("a cluster that can be simulated").rate
        });
        assert!(told >= least_gain * untold, "{slo}: {told} requests/s told, {untold} untold");
    }
}

/// The numbers of a text, in order.
fn numbers(text: &str) -> Vec<f64> {
    text.split(|c: char| !c.is_ascii_digit() && c != '.').filter_map(|word| word.parse().ok()).collect()
}

#[test]
fn the_headline_is_the_number_of_its_row_and_the_page_says_that_it_decides() {
    // More seeds and longer runs than the first search has, so that the two numbers of a cluster differ.
    let effort = Effort { requests: 160, seeds: 2, tolerance: 0.15, ..EFFORT };
    for (workload, encode_token) in
        [("epd-short:images=1,text=100,output=12", 20.0), ("epd-short:images=2,text=100,output=12", 300.0)]
    {
        let (demand, costs) = (demand(workload), Costs { encode_token, ..Costs::default() });
        let question = Question { effort, ..question(&demand, &costs, Budget::Cores(2)) };
        let answer = plan(&question, &|_| {}).expect("a plan");
        let page = markdown(&answer);
        let headline = page.lines().find(|line| line.starts_with("**")).expect("a headline");
        let row = page.lines().find(|line| line.contains(", recommended |")).expect("its row");
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        assert!(cells[1].starts_with(&format!("**{} (", answer.best.topology)), "{page}");
        // Goodput, and its interval.
        assert_eq!(numbers(cells[2])[..3], [0, 2, 3].map(|i| numbers(headline)[i]), "{page}");
        assert!(page.contains("Goodput decides") && page.contains("over 2 seeds"), "{page}");
        let settled = || answer.simulated.iter().filter_map(|cluster| Some((cluster, cluster.goodput?)));
        assert_eq!(settled().filter(|(cluster, _)| cluster.is_best).count(), 1);
        for (cluster, goodput) in settled() {
            let is_better = goodput.mean > answer.best.goodput.mean;
            assert!(
                !is_better || answer.why.contains("nothing beyond the interval"),
                "{}: {page}",
                cluster.name
            );
            assert!(!goodput.is_above(&answer.best.goodput), "{}: {page}", cluster.name);
        }
        // What the reason compares is what the table compares.
        for cluster in settled().filter(|(cluster, _)| answer.why.contains(&format!("{} with", cluster.name)))
        {
            let said = format!("{} with {:.2} requests/s", cluster.0.name, cluster.1.mean);
            assert!(answer.why.contains(&said), "{said:?} is not in {:?}", answer.why);
        }
    }
}

#[test]
fn progress_names_each_simulated_cluster_in_every_phase() {
    let demand = demand("epd-short:images=1,text=100,output=12");
    let question = question(&demand, &Costs::default(), Budget::Cores(2));
    let question = Question { effort: Effort { what_if: true, seeds: 2, ..EFFORT }, ..question };
    let told = RefCell::new(Vec::new());
    let progress = |step: Step<'_>| {
        assert!(step.done < step.of && !step.what.is_empty(), "{step:?}");
        told.borrow_mut().push((step.phase, step.done, step.what.to_owned()));
    };
    plan(&question, &progress).expect("a plan");
    let told = told.into_inner();
    assert!(told.iter().map(|(phase, ..)| phase.number()).is_sorted());
    for phase in Phase::ALL {
        let steps: Vec<_> = told.iter().filter(|(of, ..)| *of == phase).collect();
        assert!(!steps.is_empty() && steps[0].1 == 0, "{phase:?}: {told:?}");
    }
    assert!(told.iter().any(|(_, _, what)| what.ends_with(": seed 2")), "{told:?}");
    assert!(told.iter().any(|(_, _, what)| what.starts_with("twice the budget: ")), "{told:?}");
}

#[test]
fn other_demands_are_asked_for_too() {
    let demand = demand("epd-short:images=1,text=100,output=12");
    let question = question(&demand, &Costs::default(), Budget::Cores(2));
    let question = Question { effort: Effort { what_if: true, ..EFFORT }, ..question };
    let answer = plan(&question, &|_| {}).expect("a plan");
    assert_eq!(answer.sensitivity.len(), 2);
    let doubled = answer.sensitivity[0].goodput;
    assert!(doubled > answer.best.goodput.mean, "twice the budget serves {doubled}: {answer:?}");
}

#[test]
fn the_same_question_has_the_same_answer() {
    let once = || {
        serde_json::to_string(&answer(
            "epd-short:images=1,text=100,output=12",
            &Costs::default(),
            Budget::Cores(2),
        ))
    };
    assert_eq!(once().expect("JSON"), once().expect("JSON"));
}

#[test]
fn an_slo_that_no_cluster_meets_is_an_answer() {
    let demand = demand("epd-short:images=1,text=100,output=12");
    let question = Question {
        slo: "ttft=1ms".parse().expect("an SLO"),
        ..question(&demand, &Costs::default(), Budget::Cores(2))
    };
    let answer = plan(&question, &|_| {}).expect("an answer");
    assert_eq!(answer.advice, Advice::NothingHelps);
    assert!(answer.why.contains("TTFT"), "{}", answer.why);
}

#[test]
fn where_one_seed_found_nothing_the_others_are_still_asked() {
    let demand = demand("epd-short:images=1,text=100,output=12");
    let question = question(&demand, &Costs::default(), Budget::Cores(2));
    let cluster = candidate(&"colocated".parse().unwrap(), &question.curves[0], None);
    let found = expected(&question, cluster).expect("a cluster that can be simulated");
    let settled =
        settle(&question, SearchedCandidate { rate: 0.0, at: None, ..found }).expect("the same cluster");
    assert!(settled.rate > 0.0 && settled.at.is_some());
}

#[test]
fn images_that_come_again_need_less() {
    let fresh = demand("epd-short:images=4,text=100,output=12");
    let reused = Reused { demand: &fresh, share: 0.9 };
    let costs = Costs { encode_token: 800.0, ..Costs::default() };
    let goodput = |demand: &dyn Demand| {
        plan(&question(demand, &costs, Budget::Cores(3)), &|_| {}).expect("a plan").best.goodput.mean
    };
    let (few, many) = (goodput(&fresh), goodput(&reused));
    assert!(many > few * 1.2, "{few} requests/s with new images, {many} with known ones");
}

#[test]
fn a_budget_without_room_and_curves_of_two_models_are_refused() {
    let demand = demand("text:text=100,output=12");
    let two: CostCurves = CostCurves { threads: 2, ..curves_of(&Costs::default()) };
    let refused = |question: &Question<'_>| plan(question, &|_| {}).expect_err("no plan").to_string();
    let mut asked = question(&demand, &Costs::default(), Budget::Cores(1));
    asked.curves = vec![Arc::new(two.clone())];
    assert!(refused(&asked).contains("no room for a worker of 2 threads"));
    asked.curves.push(Arc::new(CostCurves { model: "other".into(), ..two }));
    assert!(refused(&asked).contains("other"));
    asked.curves.clear();
    assert!(matches!(plan(&asked, &|_| {}), Err(PlanError::NoCurves)));
}

#[test]
fn a_rate_needs_more_of_what_it_fills() {
    let demand = demand("epd-short:images=4,text=100,output=12");
    let costs = Costs { encode_token: 800.0, ..Costs::default() };
    let question = question(&demand, &costs, Budget::Workers(64));
    let most = Replicas::new(32, 32);
    let at = |rate: f64| needed(&question, rate, most).expect("a plan").expect("enough");
    let (few, many) = (at(0.5), at(2.0));
    let encoders = |replicas: &Replicas| replicas.encoders.total();
    assert!(encoders(&many) > encoders(&few) && encoders(&many) > many.pds, "{few:?} {many:?}");
    let too_few = Replicas::new(1, 1);
    assert_eq!(needed(&question, 50.0, too_few).expect("a plan"), None);
}

/// Answers that cost next to nothing.
const CHEAP_ANSWERS: Costs = Costs {
    encode_fixed: 1000.0,
    encode_token: 200.0,
    step_fixed: 100.0,
    prefill_token: 1.0,
    decode: 10.0,
    key: 0.05,
};

/// Two towers, of which the second takes a third of the first one's time, and both outputs are read as tokens.
fn towers_before_cheap_answers() -> Arc<CostCurves> {
    let costs = CHEAP_ANSWERS;
    let curves = CostCurves { kv: curves_of(&costs).kv, step: curves_of(&costs).step, ..two_towers() };
    let high =
        curves.more_towers.iter().cloned().map(|tower| TowerCurves { is_cross_attended: false, ..tower });
    Arc::new(CostCurves { more_towers: high.collect(), ..curves })
}

#[test]
fn a_rate_needs_encoders_of_each_tower_by_the_work_of_each() {
    let demand = demand("epd-short:images=1,text=20,output=2");
    let plain = question(&demand, &CHEAP_ANSWERS, Budget::Workers(64));
    let question = Question { curves: vec![towers_before_cheap_answers()], ..plain };
    let at = |rate: f64, most: Replicas| needed(&question, rate, most).expect("a plan").expect("enough");
    let most = Replicas::each(32, 2);
    let (few, many) = (at(10.0, most), at(40.0, most));
    let (few, many) = (few.encoders.counts(), many.encoders.counts());
    assert!(few.len() == 2 && many[0] > few[0] && many[0] >= 2 * many[1], "{few:?} {many:?}");
    // Workers that hold both share the work of both: no more of them are needed, and not many fewer.
    let alike = at(40.0, Replicas::new(32, 32)).encoders;
    let apart: usize = many.iter().sum();
    assert!(
        alike.counts().len() == 1 && (apart / 2..=apart).contains(&alike.total()),
        "{alike:?} and {many:?}"
    );
}

#[test]
fn encoder_workers_of_two_towers_are_as_many_as_their_costs_ask_for() {
    // Of an image of 256 tokens the first tower takes 52 ms and the second a third of that: three workers of the one keep pace
    // with one of the other, and answers cost next to nothing.
    let demand = demand("epd-short:images=1,text=20,output=2");
    let plain = question(&demand, &CHEAP_ANSWERS, Budget::Cores(5));
    let question = Question { curves: vec![towers_before_cheap_answers()], ..plain };
    let answer = plan(&question, &|_| {}).expect("a plan");
    let best_apart =
        answer.simulated.iter().find(|cluster| cluster.name.contains('+')).expect("towers apart");
    assert!(best_apart.name.starts_with("3+1e1pd ("), "{:?}", answer.simulated);
    assert!(
        answer.simulated.iter().any(|cluster| cluster.name.starts_with("4e1pd (")),
        "all on each as well"
    );
    let page = markdown(&answer);
    match answer.best.shape {
        Shape::Towers { .. } => {
            assert!(
                answer.why.contains("each encoder worker holds one tower: 3 for low, 1 for high"),
                "{}",
                answer.why
            );
            assert!(page.contains("--towers low") && page.contains("towers: [\"high\"]"), "{page}");
        }
        Shape::Split { .. } => {
            assert!(
                answer.why.contains("each encoder worker holds the towers low and high"),
                "{}",
                answer.why
            );
            assert!(!page.contains("--towers"), "{page}");
        }
        _ => assert!(!page.contains("--towers"), "{page}"),
    }
}
