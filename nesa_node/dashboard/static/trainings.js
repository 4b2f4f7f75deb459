// Loss curves of fine-tunings on the dashboard's machine.

import { Chart } from "./charts.js";
import { duration, el, number, setText } from "./words.js";

export class Trainings {
  constructor(panel, box) {
    Object.assign(this, { panel, box });
    this.shown = new Map();
  }

  // `trainings`: by folder, {name, step, loss, learning_rate, at, steps, losses, eval_losses}.
  show(trainings, now) {
    this.panel.hidden = !trainings.size;
    for (const folder of [...this.shown.keys()].filter((each) => !trainings.has(each))) {
      this.shown.get(folder).element.remove();
      this.shown.delete(folder);
    }
    for (const [folder, training] of trainings) {
      const view = this.shown.get(folder) ?? this.add(folder, training.name);
      const words = `step ${training.step}, loss ${number(training.loss)}, learning rate ${number(training.learning_rate)}, ${duration(now - training.at)} ago`;
      setText(view.words, words);
      const key = `${training.step} ${training.at}`;
      if (view.drawn === key) continue;
      view.drawn = key;
      view.chart.show([training.steps, training.losses, training.eval_losses]);
    }
  }

  add(folder, name) {
    const words = el("p.note");
    const chart = el("div.chart");
    const title = el("h3", name);
    title.title = folder;
    const element = el("div.training", title, words, chart);
    this.box.append(element);
    const view = {
      element,
      words,
      chart: new Chart(chart, `Loss of ${name}`, [
        { label: "loss", shade: "accent" },
        { label: "validation", shade: "chain-2", points: true },
      ], { steps: true }),
    };
    this.shown.set(folder, view);
    return view;
  }

  restyle() {
    for (const view of this.shown.values()) view.chart.restyle();
  }
}
