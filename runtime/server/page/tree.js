// A conversation as a tree of turns. Editing or regenerating a turn adds another version beside it; one path is shown.

export const ROOT = "";

/** Turns are records with `id` and `parent`; parents come before their children, versions in the order of their making. */
export class Tree {
  /** `chosen`: by parent, the id of the version that is shown. */
  constructor({ turns = [], chosen = {} } = {}) {
    this.turns = new Map(turns.map((turn) => [turn.id, turn]));
    this.chosen = new Map(Object.entries(chosen));
  }

  /** Adds a version, and shows it. */
  add(turn) {
    this.turns.set(turn.id, turn);
    this.choose(turn);
  }

  /** Removes a turn that no other one follows. */
  remove(turn) {
    this.turns.delete(turn.id);
    const left = this.children(turn.parent).at(-1);
    if (left) this.choose(left);
    else this.chosen.delete(turn.parent);
  }

  choose(turn) {
    this.chosen.set(turn.parent, turn.id);
  }

  children(parent) {
    return [...this.turns.values()].filter((turn) => turn.parent === parent);
  }

  /** All versions of a turn, itself among them. */
  versions(turn) {
    return this.children(turn.parent);
  }

  /** The turns that are shown, from the first to the last. */
  get path() {
    const found = [];
    let turn = this.shown(ROOT);
    for (; turn; turn = this.shown(turn.id)) found.push(turn);
    return found;
  }

  shown(parent) {
    return this.turns.get(this.chosen.get(parent)) ?? this.children(parent).at(-1);
  }

  /** A turn and those before it. */
  upTo(turn) {
    const found = [turn];
    while (found[0].parent !== ROOT) found.unshift(this.turns.get(found[0].parent));
    return found;
  }

  toJSON() {
    return { turns: [...this.turns.values()], chosen: Object.fromEntries(this.chosen) };
  }
}
