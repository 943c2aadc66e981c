// @ts-check
/**
 * What frames are made of, as `docs/picture.md` describes them. Types only.
 */

/**
 * @typedef {object} Stat
 * @property {number} used
 * @property {number} kept
 * @property {number} empty
 * @property {number} shared
 * @property {number} hits
 * @property {number} evicted
 * @property {number} running
 * @property {number} waiting
 * @property {number} finished
 * @property {number} scheduled
 * @property {number} decode
 * @property {number} prefill
 * @property {number} recompute
 * @property {number} cached
 * @property {number} prompt_tokens
 * @property {number} cached_tokens
 * @property {number} output_tokens
 * @property {number} preemptions
 * @property {number} evictions
 * @property {number | null} step_ms
 * @property {number | null} device_ms
 * @property {number | null} tokens_per_s
 */

/**
 * @typedef {object} Info
 * @property {string} model
 * @property {number} block_size
 * @property {number} num_blocks
 * @property {number} max_num_seqs
 * @property {number} max_num_batched_tokens
 * @property {number} max_model_len
 * @property {string} engine  device, attention and async scheduling in words
 */

/**
 * @typedef {object} Row
 * @property {string} id
 * @property {number} slot
 * @property {"waiting" | "running" | "preempted" | "finished"} state
 * @property {string} why
 * @property {number} prompt
 * @property {number} cached
 * @property {number} computed
 * @property {number} output
 * @property {number} lost
 * @property {number | null} max
 * @property {number} blocks
 * @property {number} shared
 * @property {number} preemptions
 * @property {number} arrived
 * @property {number | null} ended
 * @property {number | null} waited  steps until it was first scheduled
 * @property {string} prompt_text
 * @property {string} text    the end of its output
 * @property {Token[]} tokens the last ones, whose texts end `text`
 * @property {Did[]} did
 */

/**
 * First step, number of steps, letter (p prefill, d decode, r computed again, x preempted),
 * tokens of each step, tokens from the cache in the first.
 * @typedef {[number, number, string, number, number?]} Did
 */

/**
 * Length in UTF-16 units, step, ms since the token before; where there is more, its chance,
 * [text, chance] of the most likely others, steps lost to a preemption before it.
 * @typedef {[number, number, number | null, (number | null)?, [string, number][]?, number?]} SentToken
 */

/**
 * @typedef {object} Token
 * @property {string} text
 * @property {number} step
 * @property {number | null} ms
 * @property {number | null} chance
 * @property {[string, number][] | null} others
 * @property {number} stall  steps
 */

/**
 * A row as a frame has it.
 * @typedef {Partial<Omit<Row, "tokens">> & {id: string, add?: string, tokens?: SentToken[]}} SentRow
 */

/**
 * What a struct is made of: JSON, long parts cut.
 * @typedef {{kind: string, fields: [string, any][], changed: string[]}} StructTree
 */

/**
 * Block id, owners, text, stored by, whose content was evicted in this step, hash.
 * @typedef {[number, string[], string, string | null, string | null, string | null]} Cell
 */

/** @typedef {[string, number, boolean]} Break */

/**
 * A run of blocks that follow one another in the texts of the same requests.
 * @typedef {object} TreeNode
 * @property {number} id
 * @property {number} parent  id, -1 at the beginning of a text
 * @property {number} start   blocks before it
 * @property {number} count   blocks
 * @property {string} text    its beginning
 * @property {string[]} readers
 * @property {string | null} keptBy  who stored it, "" when nobody knows; null while it is read
 */

/**
 * Nodes by id; blocks hit in this step by node and request; of the next waiting requests the node
 * up to which each would reuse (-1: none) and how many blocks. Replaced as a whole, never changed.
 * @typedef {object} Tree
 * @property {Map<number, TreeNode>} nodes
 * @property {Record<string, Record<string, number>>} hits
 * @property {[string, number, number][]} waiting
 * @property {string} note
 */

/**
 * @typedef {object} SentTree
 * @property {any[][]} nodes
 * @property {number[]} [gone]
 * @property {Record<string, Record<string, number>>} [hits]
 * @property {[string, number, number][]} [waiting]
 * @property {string} [note]
 */

/** @typedef {import("./columns.js").Columns} Columns */

/**
 * Counts of neighbours. Flags: HIT, EVICTED and WRITTEN, and SHARED.
 * @typedef {{size: number, used: Uint16Array, kept: Uint16Array, slot: Uint8Array, flags: Uint8Array}} Bins
 */

/**
 * @typedef {object} Frame
 * @property {number} v
 * @property {"full" | "delta"} k
 * @property {number} seq
 * @property {number} epoch
 * @property {number} step
 * @property {string} boundary
 * @property {number} [at]
 * @property {string} [where]
 * @property {string} [in_flight]
 * @property {StructTree | null} [struct]
 * @property {number} time
 * @property {string} phase
 * @property {Info} [info]
 * @property {Stat} stat
 * @property {number[]} next
 * @property {SentRow[]} rows
 * @property {any[][]} [log]  first step, step, time, counts in the order of LOG_NAMES, preempted
 * @property {string[]} [preempted]
 * @property {Record<string, string>} [misses]
 * @property {Break[]} [breaks]
 * @property {SentTree} [tree]
 * @property {number | null} [speed]
 * @property {string[]} [gone]
 * @property {Cell[]} [cells]
 * @property {number} [bin]  blocks in a bin, where the columns are of bins
 * @property {Window} [window]  of a pool in bins: the blocks that were asked for
 * @property {SentMass} [mass]  while somebody measures it
 * @property {string} note
 * @property {Record<string, number[]>} [columns]  in a page
 */

/**
 * Blocks told singly: those not among `blocks`, as id, slot, state, ref and fill, are empty.
 * `mass` has their levels of attention, as in SentMass.
 * @typedef {{first: number, count: number, blocks: number[][], cells: Cell[], mass?: number[]}} Window
 */

/**
 * The largest share of the step's attention that a block has, and as parts of it, 1 to 255, what
 * blocks or bins have: id, level, id, level, ...
 * @typedef {{top: number, of: number[]}} SentMass
 */

/** Levels by block, or by bin. Replaced as a whole, never changed. @typedef {{top: number, levels: ReadonlyMap<number, number>}} Mass */

/**
 * `mass` has the blocks, or first blocks of bins, whose level is another one.
 * @typedef {{all: boolean, blocks: Set<number>, mass: Set<number>, rows: Set<string>, list: boolean}} Changes
 */

export {};
