"""Settings of the corpus, the tokenizer and the samples."""

import dataclasses
import enum

from maxmeg.config.labelled import GLUE, Format, Scored
from maxmeg.config.retro import Neighbours
from maxmeg.config.setting import Section, setting

MASKED_SHARE = 0.15  # of the tokens of a row at most, as in BERT
HAS_TEXT = "has_text_"  # + number of a text: arrays [B] of a batch, 1 for rows that have it


class DataOrder(enum.Enum):
    megatron = "megatron"
    native = "native"


class Builtin(enum.Enum):
    none = "none"
    source = "source"
    sentences = "sentences"


class Objective(enum.Enum):
    gpt = "gpt"
    sft = "sft"
    preferences = "preferences"
    masked = "masked"
    classify = "classify"
    tag = "tag"
    choose = "choose"
    span_corruption = "span_corruption"
    seq2seq = "seq2seq"
    ict = "ict"
    retrieve = "retrieve"
    retro = "retro"
    image_text = "image_text"

    @property
    def is_trained(self) -> bool:
        """Whether models can be trained with it; the data of the others can be inspected."""
        return self not in (Objective.preferences, Objective.image_text)

    @property
    def is_labelled(self) -> bool:
        """Whether its models have a classifier in place of output weights (model.head)."""
        return self in (Objective.classify, Objective.tag, Objective.choose)

    @property
    def predicts_tokens(self) -> bool:
        """Whether its loss is that of tokens of a vocabulary."""
        return not (self.is_labelled or self.is_retrieval)

    def takes(self, causal: bool) -> bool:
        """Whether it trains causal models, in which a token attends to itself and earlier tokens
        only, or bidirectional ones."""
        is_bidirectional = self is Objective.masked or self.is_retrieval
        return self.is_labelled or causal == (not is_bidirectional)

    @property
    def is_retrieval(self) -> bool:
        """Whether its models are biencoders (model.head.biencoder)."""
        return self in (Objective.ict, Objective.retrieve)

    @property
    def has_source(self) -> bool:
        """Whether its samples have a source, which an encoder-decoder reads."""
        return self in (Objective.span_corruption, Objective.seq2seq, Objective.retro)

    @property
    def has_neighbours(self) -> bool:
        """Whether this source are the neighbours of the target's chunks."""
        return self is Objective.retro


class Packing(enum.Enum):
    none = "none"
    greedy = "greedy"
    first_fit = "first_fit"
    best_fit = "best_fit"


class TooLong(enum.Enum):
    drop = "drop"
    truncate = "truncate"


@dataclasses.dataclass(repr=False)
class DataConfig(Section):
    """Corpus, tokenizer and samples."""

    paths: tuple[str, ...] = setting(
        (),
        "prefixes of .bin/.idx files, divided by split: a blend by weights (0.7,a,0.3,b), or one "
        "epoch of each (a,b)",
        "--data-path",
    )
    max_epochs: float = setting(
        1000.0,
        "limit of the epochs of training: a run that would need more is refused; 0: no limit",
        at_least=0,
    )
    builtin: Builtin = setting(
        Builtin.none,
        "corpus that every machine has, read if no other setting names one: the source code of "
        "Python's standard library, or the sentences of its docstrings",
    )
    split: str = setting("969,30,1", "weights of train, validation and test", "--split")
    train_paths: tuple[str, ...] = setting(
        (),
        "training corpora as in paths, not divided; instead of paths and split",
        "--train-data-path",
    )
    validation_paths: tuple[str, ...] = setting(
        (), "validation corpora, as train_paths", "--valid-data-path"
    )
    test_paths: tuple[str, ...] = setting((), "test corpora, as train_paths", "--test-data-path")
    blend: str = setting(
        "",
        "YAML or JSON file instead of paths: a list like paths, or one for each of train, "
        "validation and test",
        "--data-args-path, --per-split-data-args-path",
    )
    mock: bool = setting(
        False,
        "synthetic counting sequences, a third each for train, validation, test",
        "--mock-data",
    )
    validate_each: bool = setting(
        False,
        "report the loss of each of validation_paths (or those of blend), and their mean",
        "--multiple-validation-sets",
    )
    blend_surplus: float = setting(
        0.005,
        "surplus samples of each corpus of a weighted blend, as a fraction of its share, >= 0",
        "--mid-level-dataset-surplus",
        at_least=0,
    )
    blend_changes: tuple[str, ...] = setting(
        (),
        "training blends after these steps: 1000:0.5,a,0.5,b,5000:0.2,b,0.8,c or 1000:FILE.yaml; "
        "each corpus continues with its next sample",
    )
    order: DataOrder = setting(
        DataOrder.megatron,
        "megatron: Megatron-LM's samples, which depend on seed and num_steps; each validation "
        "continues where the last ended | native: a computed permutation; every validation reads "
        "the same samples, the first in reading order",
    )
    objective: Objective = setting(
        Objective.gpt,
        "gpt: the next token, in .bin/.idx files | sft: the assistant's messages of chats, in "
        ".jsonl, .json, .parquet or datasets' files or folders (a row: {messages: [{role, "
        "content}, ...]}, or ShareGPT's, Alpaca's) | masked: masked tokens (BERT), in .bin/.idx "
        "files of sentences (maxmeg preprocess --split_sentences), with "
        "model.attention.causal=false | span_corruption: removed spans of the same files (T5) | "
        "seq2seq: text n of the second corpus from text n of the first, "
        "data.paths=SOURCE,TARGET (maxmeg preprocess --aligned) | classify: the class of a text or "
        "a pair of texts | tag: the class of each word | choose: the right one of several texts; "
        "these three read files in data.format | ict: inverse cloze task, which block a sentence "
        "was taken from, in the files of masked | retrieve: the text that answers a query, in "
        ".jsonl files (a row: {query, text, negatives: [text, ...]}; a text: a string or {title, "
        "text}); ict and retrieve train biencoders, with model.attention.causal=false | retro: the "
        "next token, with the neighbours of the text's chunks (maxmeg neighbours) | preferences: "
        "two answers to a prompt, in files as for sft (a row: {prompt, chosen, rejected}) | "
        "image_text: texts with an image each (maxmeg preprocess image-text); these two are not "
        "trained yet, `maxmeg preprocess inspect --config` shows what a run would read",
        "--sft",
    )
    sentence_pairs: bool = setting(
        False,
        "masked: a sample has two segments, which half of the samples swap, and "
        "model.bert.pair_head predicts it; the flag is its negation",
        "--bert-no-binary-head",
        needs="objective=masked",
    )
    format: Format = setting(
        Format.suffix,
        "labelled files. suffix: rows as for sft, .tsv (with a header line) or .conll, by name; "
        "cola, sst2, mrpc, qqp, mnli, snli, qnli, rte, wnli: .tsv as GLUE publishes it; race: "
        "folders of its .txt files; conll: words and their labels in lines",
        needs="objective=classify|tag|choose",
    )
    columns: tuple[str, ...] = setting(
        (),
        "names of columns or JSON fields: of the text or the two texts, then of the label; empty: "
        "text, text_pair if there is one, label; for choose: context, question, choices, label; "
        "for tag: tokens, labels; for retrieve: query, text, negatives",
        needs="objective=classify|tag|choose|retrieve",
    )
    labels: tuple[str, ...] = setting(
        (),
        "names of the classes, in order; empty: those of data.format",
        needs="objective=classify|tag",
    )
    scored: Scored = setting(
        Scored.first,
        "token of a text that the classifier reads: first (BERT's class token) | last (causal "
        "models need it)",
        needs="objective=classify|choose",
    )
    query_length: int = setting(
        64,
        "maximum length of a query, tokens; its row of sequence_length tokens also has its texts",
        at_least=3,
        needs="objective=ict|retrieve",
    )
    separate_queries: bool = setting(
        False,
        "queries have rows of their own, of query_length tokens, and texts have all of "
        "sequence_length; for model.head.biencoder=separate",
        needs="objective=ict|retrieve",
    )
    titles: str = setting(
        "",
        "prefix of a .bin/.idx file with a title for each document, put before its blocks",
        "--titles-data-path",
        needs="objective=ict",
    )
    query_in_block: float = setting(
        0.1,
        "fraction of samples whose block keeps the sentence that is the query, in [0, 1]",
        "--query-in-block-prob",
        at_least=0,
        at_most=1,
        needs="objective=ict",
    )
    negatives: int = setting(
        0,
        "hard negatives of each query, drawn anew in each epoch from those of its row",
        "--train-hard-neg",
        at_least=0,
        needs="objective=retrieve",
    )
    chat_template: str = setting(
        "",
        "Jinja file for sft and preferences; empty: the tokenizer's",
        "--sft-tokenizer-prompt-format",
        needs="objective=sft|preferences",
    )
    too_long: TooLong = setting(
        TooLong.drop,
        "what happens to chats and answers of more than sequence_length + 1 tokens, pairs of "
        "seq2seq with a text that is too long, and labelled texts of more than sequence_length: "
        "drop (an error in labelled validation sets) | truncate (of a labelled pair the longer "
        "text). Their number is reported. ict and retrieve always truncate",
        needs="objective=sft|preferences|seq2seq|classify|tag|choose",
    )
    packing: Packing = setting(
        Packing.none,
        "pack whole documents, without attention across them: greedy | first_fit | best_fit; none: "
        "gpt cuts through documents, sft has one chat per row",
    )
    sequence_length: int = setting(
        256,
        "tokens per sample; of an encoder-decoder: of the target",
        "--seq-length, --decoder-seq-length",
        at_least=1,
    )
    source_length: int = setting(
        0,
        "tokens per sample of an encoder-decoder's source; 0: sequence_length",
        "--encoder-seq-length",
        at_least=0,
        needs="objective=span_corruption|seq2seq",
    )
    start_token: int = setting(
        -1,
        "id of the first token of an encoder-decoder's targets, in training on pairs and in "
        "generation, unless data.tokenizer names one (bos=); an import sets it to "
        "decoder_start_token_id; -1: the tokenizer's",
        at_least=-1,
    )
    neighbours: str = setting(
        "",
        "folder that maxmeg neighbours writes; empty: PREFIX.neighbours beside data.paths=PREFIX",
        "--retro-project-dir",
        needs="objective=retro",
    )
    read_neighbours: Neighbours = setting(
        Neighbours.nearest,
        "neighbours that the model reads: nearest | shuffled: another chunk's, of the same split | "
        "none",
        needs="objective=retro",
    )
    num_neighbours: int = setting(
        2,
        "neighbours of a chunk",
        "--retro-num-neighbors",
        at_least=1,
        needs="objective=retro",
    )
    chunk_length: int = setting(
        64,
        "tokens of a chunk; it divides sequence_length",
        "--retro-gpt-chunk-length",
        at_least=1,
        needs="objective=retro",
    )
    neighbour_length: int = setting(
        128,
        "tokens of a neighbour: a chunk and the text that follows it in its document",
        at_least=1,
        needs="objective=retro",
    )
    image_size: tuple[int, ...] = setting(
        (336, 336),
        "height,width that images are scaled to, pixels",
        "--img-h, --img-w",
        needs="objective=image_text",
    )
    tokens_per_image: int = setting(
        576,
        "tokens of a text that stand for its image; the rest of sequence_length is for text",
        at_least=1,
        needs="objective=image_text",
    )
    image_token: str = setting(
        "<image>",
        "the token in texts that an image replaces; a text without one begins with its image",
        needs="objective=image_text",
    )
    tokenizer: str = setting(
        "bytes",
        "bytes | null:N | sentencepiece:FILE | huggingface:FILE | gpt2:FOLDER | wordpiece:FILE | "
        "tiktoken:FILE; ?special_tokens=NAME,NAME after it adds tokens",
        "--tokenizer-type",
    )
    cache_dir: str = setting(
        "",
        "local folder for prepared corpora, orders of samples, and blocks of corpora in object "
        "storage (s3://bucket/prefix); empty: RUN_DIR/data",
        "--data-cache-path, --object-storage-cache-path",
    )
    cache_gb: float = setting(
        50.0,
        "GB (10^9 bytes) of .bin files in object storage that a node keeps in cache_dir, > 0",
        at_least=0.01,
    )
    chunk_kb: int = setting(
        1024,
        "KiB per read from object storage: more if the cache holds a whole corpus, less if not",
        at_least=1,
    )
    num_workers: int = setting(0, "loader processes; 0: threads", "--num-workers", at_least=0)
    prefetch: int = setting(2, "batches prepared in advance per worker, >= 1", at_least=1)
    reset_position_ids: bool = setting(
        False, "positions restart after each end of document", "--reset-position-ids"
    )
    reset_attention_mask: bool = setting(
        False, "no attention across documents", "--reset-attention-mask"
    )
    eod_mask_loss: bool = setting(
        False, "no loss where the input is the end of a document", "--eod-mask-loss"
    )
    fim_rate: float = setting(
        0.0,
        "fill in the middle (FIM): fraction of documents in samples, in [0, 1]",
        "--fim-rate",
        at_least=0,
        at_most=1,
    )
    fim_spm_rate: float = setting(
        0.5,
        "fraction of FIM documents with the suffix before the prefix, in [0, 1]",
        "--fim-spm-rate",
        at_least=0,
        at_most=1,
        needs="fim_rate",
    )
    fim_tokens: tuple[str, ...] = setting(
        (),
        "FIM's prefix, middle, suffix and padding token, by name or id",
        "--fim-prefix-token, --fim-middle-token, --fim-suffix-token, --fim-pad-token",
        needs="fim_rate",
    )
    fim_split: str = setting(
        "",
        "token that divides documents into FIM fragments; empty: none",
        "--fim-split-sample",
        needs="fim_rate",
    )
    fim_fragment_rate: float = setting(
        0.5,
        "fraction of fragments, in [0, 1]",
        "--fim-fragment-rate",
        at_least=0,
        at_most=1,
        needs="fim_split",
    )
    fim_no_prefix: str = setting(
        "",
        "texts with this prefix stay unchanged; empty: none",
        "--fim-no-prefix",
        needs="fim_rate",
    )

    @property
    def names_corpus(self) -> bool:
        """Whether a setting names a corpus to train on."""
        return bool(self.paths or self.train_paths or self.blend)

    @property
    def has_segments(self) -> bool:
        """Whether batches have segment_ids: attention stays within documents, or skips padding."""
        objective = self.objective
        if objective is Objective.masked or objective.has_source or objective.is_labelled:
            return True
        if objective.is_retrieval:
            return True
        return self.reset_attention_mask or self.packing is not Packing.none

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in order: data.labels, or those of data.format."""
        layout = GLUE.get(self.format)
        return self.labels or (layout.labels if layout else ())

    @property
    def num_classes(self) -> int:
        """Number of classes that the objective's models predict; 0: they predict tokens."""
        scores = int(self.objective is Objective.choose)
        return len(self.class_names) if self.objective.is_labelled and not scores else scores

    @property
    def text_tokens(self) -> int:
        """Most tokens of each text that a query is compared with, beside the query in a row."""
        queries = 0 if self.separate_queries else self.query_length
        return (self.sequence_length - queries) // (1 + self.negatives)

    @property
    def max_targets(self) -> int:
        """Largest number of targets in a row. With objective=masked it is the number of masked
        tokens, rounded up to a multiple of 8 for fast matrix products."""
        if self.objective is not Objective.masked:
            return self.sequence_length
        masked = max(1, round(MASKED_SHARE * self.sequence_length))
        return min(-(-masked // 8) * 8, self.sequence_length)

    @property
    def longest_text(self) -> int:
        """Number of positions that a sample needs."""
        longest = max(self.query_length, self.text_tokens)
        return longest if self.objective.is_retrieval else self.sequence_length

    @property
    def has_source(self) -> bool:
        """Whether samples have a second row: an encoder-decoder's source, or a separate query."""
        return self.source_tokens > 0

    @property
    def source_tokens(self) -> int:
        """Tokens per sample of the source; 0 without one."""
        if self.objective.is_retrieval:
            return self.query_length * self.separate_queries
        if self.objective.has_neighbours:
            chunks = self.sequence_length // self.chunk_length
            return chunks * self.num_neighbours * self.neighbour_length
        return (self.source_length or self.sequence_length) * self.objective.has_source

    @property
    def source_positions(self) -> int:
        """Number of positions of the source's tokens."""
        return self.neighbour_length if self.objective.has_neighbours else self.source_tokens
