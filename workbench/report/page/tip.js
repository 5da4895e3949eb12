// The text beside the pointer.

export class Tip {
  constructor(element) {
    this.element = element;
  }

  show(text, x, y) {
    const { element } = this;
    element.textContent = text;
    element.hidden = false;
    const isLow = y + 18 + element.offsetHeight > innerHeight;
    element.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - element.offsetWidth - 8))}px`;
    element.style.top = `${isLow ? y - element.offsetHeight - 10 : y + 18}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}
